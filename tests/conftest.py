"""How the tests are dealt out to processes (`make test`: pytest-xdist, --dist loadgroup).

A group runs in one process, in order. Tests that share processes or a module's fixtures are a group, a file is one by
default, and what depends on nothing (a kernel that is compiled) is dealt out one by one. Groups that take longest come
first and single tests last, so that no process is left with much at the end.
"""

from __future__ import annotations

import gc
import os
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import THOROUGH

# Several processes share the cores: threads that add up one product in parts only wait for each other. Set before
# PyTorch is imported, and inherited by every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"

# The same examples in each run, whatever else the machine does. `make nightly` draws others, and ten times as many.
_ANY_LOAD = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, **_ANY_LOAD)
settings.register_profile("thorough", max_examples=1000, **_ANY_LOAD)
settings.load_profile("thorough" if THOROUGH else "ci")

HERE = Path(__file__).parent
# Session fixtures that start services, by folder: tests that use one share it.
SHARED_SERVICES = {"e2e": "cluster", "cli": "service"}
SINGLE_TESTS = (
    "kernels/test_*_compile.py",
    "kernels/test_*_compiles.py",
    "kernels/test_compiles.py",
    "e2e/test_kinds_sabotage.py",
    "e2e/test_recurrent_families.py",
    "e2e/test_states_sabotage.py",
)
# By CPU time; the others take less than those at the end.
LONGEST_FIRST = (
    "e2e/test_eval.py",
    "worker_service/test_model_parity.py",
    "kernels/test_interpreted.py",
    "cli/test_main_job.py",
    "e2e/test_session_failures.py",
    "cli/test_up.py",
    "service",
    "e2e/test_states.py",
    "e2e/test_kinds.py",
    "register_qa/test_hybrid.py",
    "worker_service/test_model_states.py",
    "worker_service/test_hub.py",
    "simulation/test_simulation.py",
    "e2e/test_inventory.py",
    "worker_service/test_scheduler_liveness.py",
    "cluster",
    "cli/test_bench_serving.py",
    "e2e/test_families.py",
    "register_qa/test_model.py",
    "register_qa/test_training.py",
    "tier_client/test_transformers_example.py",
    "e2e/test_chaos.py",
    "worker_service/test_invariance_kinds.py",
    "e2e/test_sabotage.py",
    "e2e/test_worker_failures.py",
    "e2e/test_host_tier.py",
    "e2e/test_device_faults.py",
    "e2e/test_host_copies.py",
    "worker_service/test_compressed_reads.py",
    "core/test_state_machine.py",
    "adapters/test_explained.py",
    "e2e/test_reuse.py",
    "e2e/test_windows.py",
    "e2e/test_worker_start.py",
    "worker_service/test_restoration.py",
)


# Where a test may load a model into the tests' own process, which then flushes subnormal numbers to zero.
COMPUTES = ("worker_service", "e2e")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Subnormal numbers are back for all other tests: hypothesis refuses to draw floats without them."""
    if "torch" in sys.modules and item.path.parent.name not in COMPUTES:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups = {item: _group(item) for item in items}
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    last = len(ranks) + 1

    def rank(item: pytest.Item) -> int:
        return ranks.get(groups[item], ranks.get(_file(item.path), last - 1 if groups[item] else last))

    items.sort(key=rank)
    for item, group in groups.items():
        if group and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish() -> None:
    """Collections of garbage pass over modules and tests: 0.2 s each with PyTorch and transformers."""
    gc.collect()
    gc.freeze()


def _group(item: pytest.Item) -> str:
    """Empty for a test that any process may run. A test that names its group keeps it."""
    if own := item.get_closest_marker("xdist_group"):
        return str(own.args[0])
    shared = SHARED_SERVICES.get(item.path.parent.name, "")
    if shared in getattr(item, "fixturenames", ()):
        return shared
    return "" if _has_single_tests(item.path) else _file(item.path)


# Thousands of tests have few files.
@cache
def _has_single_tests(path: Path) -> bool:
    return any(path.match(pattern) for pattern in SINGLE_TESTS)


@cache
def _file(path: Path) -> str:
    return str(path.relative_to(HERE))
