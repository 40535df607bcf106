"""Who may import whom, and that the cache service runs where no torch is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import PRODUCT, ROOT, imports, modules, relative

# What would let bytes from a store or a client become code.
FORBIDDEN_EVERYWHERE = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
# A core is told the time and hands out what it wants done.
FORBIDDEN_IN_CORES = {
    "asyncio",
    "logging",
    "os",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
}

# What a core may see of the session: its values, never the wire format.
SESSION_VALUES = tuple(
    f"session.{name}" for name in ("words", "messages", "hello_check", "errors", "limits", "protocol")
)

# What ops are made of: jit functions for all of them.
SHARED_BY_KERNELS = {"addressing", "block_scan", "fp8", "rotation", "scores", "softmax", "state_slots"}


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("service", ["cache_service", "worker_service"])
def test_cores_import_the_standard_library_the_sessions_words_and_themselves(service: str) -> None:
    core = f"{service}.core"
    strangers = [
        f"{relative(path)} imports {name}"
        for path in modules(f"{service}/core")
        for name in imports(path)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not is_of(name, core)
        and not any(is_of(name, module) for module in SESSION_VALUES)
    ]
    assert not strangers, strangers


@pytest.mark.parametrize("service", ["cache_service", "worker_service"])
def test_cores_know_no_clock_no_thread_and_no_chance(service: str) -> None:
    effects = [
        f"{relative(path)} imports {name}"
        for path in modules(f"{service}/core")
        for name in imports(path)
        if name.partition(".")[0] in FORBIDDEN_IN_CORES
    ]
    assert not effects, effects


def test_nothing_reads_pickles() -> None:
    readers = [
        f"{relative(path)} imports {name}"
        for path in modules(*PRODUCT, "benchmarks")
        for name in imports(path)
        if name.partition(".")[0] in FORBIDDEN_EVERYWHERE
    ]
    assert not readers, readers


def test_a_kernel_op_never_looks_into_another() -> None:
    ops = {path.parent.name for path in (ROOT / "kernels").glob("*/triton.py")} - SHARED_BY_KERNELS
    assert {"append_kv", "prefill_attention"} <= ops
    lookers = []
    for path in modules("kernels"):
        own = path.relative_to(ROOT / "kernels").parts[0]
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "kernels" and len(parts) > 2 and parts[1] in ops - {own} and _is_internal(parts):
                lookers.append(f"{relative(path)} imports {name}")
    assert not lookers, lookers


def _is_internal(parts: list[str]) -> bool:
    """kernels.op.name: a module of the op, rather than a name that its __init__ offers."""
    return len(parts) > 3 or (ROOT / "kernels" / parts[1] / f"{parts[2]}.py").exists()


def test_the_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


WITHOUT_TORCH = """
import importlib, pkgutil, sys
for name in ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "typer", "rich", "xxhash"):
    sys.modules[name] = None  # importing it fails, as where it is not installed
for package in ("protos", "rpc", "session", "cache_service"):
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
import runpy
sys.argv = ["cache_service", "--help"]
runpy.run_module("cache_service", run_name="__main__")
"""


def test_the_cache_service_runs_without_torch() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "--listen" in result.stdout


CLIENT_ALONE = """
import importlib, pkgutil, sys
for name in ("torch", "triton", "numpy", "safetensors", "tokenizers", "rpc", "cache_service", "worker_service", "cli"):
    sys.modules[name] = None
root = importlib.import_module("tier_client")
for module in pkgutil.walk_packages(root.__path__, "tier_client."):
    importlib.import_module(module.name)
"""


def test_the_host_tiers_client_needs_no_torch_and_no_service() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CLIENT_ALONE], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("service", ["cache_service", "worker_service"])
def test_the_listener_is_chosen_before_grpc_reads_it(service: str) -> None:
    """gRPC reads its experiments when it is imported, so `main` imports it, and not the module."""
    code = f"import sys, {service}.__main__; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
