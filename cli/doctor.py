"""`stemcache doctor`: looks at what usually goes wrong, says what it saw, and what to do about it.

Changes nothing.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from cli.app import CacheOption, JsonOption, app, run
from cli.checkup import Finding, look_at_services
from cli.devices import has_gpu
from cli.output import Output, plain, table
from cli.places import cache_from_environment, check_address
from cli.redis_server import find_redis_binary
from cli.run_file import state_dir

PACKAGES = ("stemcache", "grpcio", "protobuf", "redis", "hiredis")
WORKER_PACKAGES = ("torch", "safetensors", "tokenizers")
MIN_FREE_BYTES = 2 << 30


@app.command()
def doctor(cache: CacheOption = "", json_: JsonOption = False) -> None:
    """Check this machine and the running services; exit code 1 when something is broken."""
    output = Output(as_json=json_)
    if cache:
        check_address("--cache", cache)
    with output.working("looking"):
        findings = [check() for check in CHECKS] + run(look_at_services(cache))
    marks = {True: "[green]ok[/green]", None: "[yellow]note[/yellow]", False: "[red]broken[/red]"}
    rows = [(marks[f.ok], f.what, plain(f.seen + (f"; {f.advice}" if f.advice else ""))) for f in findings]
    output.show(table("", ("", "what", "seen"), rows, left=3))
    healthy = all(finding.ok is not False for finding in findings)
    output.emit({"healthy": healthy, "findings": [finding._asdict() for finding in findings]})
    if not healthy:
        raise typer.Exit(1)


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    return Finding("Python", good, platform.python_version(), "" if good else "3.11 or newer is needed")


def _packages() -> Finding:
    found = {name: _version(name) for name in (*PACKAGES, *WORKER_PACKAGES, "triton")}
    seen = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    if missing := [name for name in PACKAGES if not found[name]]:
        return Finding("packages", False, seen, f"not installed: {', '.join(missing)}; run `make setup`")
    if missing := [name for name in WORKER_PACKAGES if not found[name]]:
        return Finding("packages", None, seen, f"not installed: {', '.join(missing)}, so no worker runs here")
    return Finding("packages", True, seen)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _accelerator() -> Finding:
    """Returns a finding on the GPUs that the driver shows: to import PyTorch takes seconds."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return Finding("accelerator", None, "PyTorch is not installed", "workers need it; the cache service does not")
    if not has_gpu():
        return Finding("accelerator", None, f"none; {os.cpu_count()} CPU cores", "workers run on the CPU")
    if torch.endswith("+cpu"):
        return Finding("accelerator", None, f"a GPU, but PyTorch {torch} is a build for CPUs", "install one with CUDA")
    return Finding("accelerator", True, _gpu_names() or "a GPU")


def _gpu_names() -> str:
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for path in found for line in path.read_text().splitlines() if line.startswith("Model:")]
    return ", ".join(line.partition(":")[2].strip() for line in lines)


def _redis() -> Finding:
    binary = find_redis_binary()
    if binary is None and cache_from_environment():
        return Finding("redis-server", True, "none here, and none needed: the environment names the services")
    if binary is None:
        advice = "install Redis, or workers will spill to their own memory and share nothing"
        return Finding("redis-server", None, "none found", advice)
    try:
        asked = subprocess.run(  # noqa: S603 - the binary that `stemcache up` would run
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        return Finding("redis-server", False, binary, f"it does not run: {type(error).__name__}")
    number = next((word[2:] for word in asked.stdout.split() if word.startswith("v=")), "of unknown version")
    return Finding("redis-server", True, f"{number}, {binary}")


def _disk() -> Finding:
    free = shutil.disk_usage(state_dir() if state_dir().exists() else ".").free
    good = free >= MIN_FREE_BYTES
    return Finding("free disk", good, f"{free / 2**30:.1f} GiB", "" if good else "logs and models need room")


CHECKS: tuple[Callable[[], Finding], ...] = (_python, _packages, _accelerator, _redis, _disk)
