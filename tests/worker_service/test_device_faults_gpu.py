"""A CUDA device that is lost under a worker, by a real device-side assert in a process of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from cli.random_model import make_random_model
from tests.e2e.processes import cache_process
from tests.worker_service.cuda_device import NEEDS_CUDA
from tests.worker_service.device_faults import BYSTANDERS, faulty_worker, generate, lose_device

pytestmark = NEEDS_CUDA


@pytest.mark.parametrize("graphs", ["true", "false"])
async def test_a_device_side_assert_ends_the_process_with_code_1(tmp_path: Path, graphs: str) -> None:
    make_random_model(tmp_path / "model", seed=1)
    cache = cache_process(tmp_path)
    worker = faulty_worker(tmp_path, tmp_path / "model", "", "assert", "cuda", cuda_graphs=graphs)
    try:
        cache.start()
        worker.settings["cache"] = cache.address
        worker.start()
        await generate(worker.address, BYSTANDERS[0], 4)
        outcome = await lose_device(worker)
        print(outcome)
        assert set(outcome.codes) == {grpc.StatusCode.UNAVAILABLE}
        assert outcome.not_serving_s < 1.0
        assert outcome.exit_code == 1
        assert "Fatal Python error" not in worker.logged()
        assert "terminate called" not in worker.logged()
        # What a supervisor does: the same settings serve again.
        worker.start()
        assert len(await generate(worker.address, BYSTANDERS[0], 4)) == 4
    finally:
        worker.kill()
        cache.kill()


async def test_what_does_not_fit_into_memory_together_runs_apart(tmp_path: Path) -> None:
    """Allocations that fail for real; the tokens are those of each prompt alone, as bits depend on no other row."""
    make_random_model(tmp_path / "model", seed=1)
    cache = cache_process(tmp_path)
    worker = faulty_worker(tmp_path, tmp_path / "model", "", "memory", "cuda")
    try:
        cache.start()
        worker.settings["cache"] = cache.address
        worker.start()
        alone = [await generate(worker.address, prompt, 60, salt="alone") for prompt in BYSTANDERS]
        assert await asyncio.gather(*(generate(worker.address, prompt, 60) for prompt in BYSTANDERS)) == alone
        assert "OutOfMemoryError" in worker.logged()
    finally:
        worker.kill()
        cache.kill()
