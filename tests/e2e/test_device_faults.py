"""A device that is lost, hangs, or has no memory, as far as a CPU can play it: the worker ends, and comes back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from cli.addresses import free_port
from cli.client import wait_serving
from cli.supervisor import ChildSpec, Supervisor
from tests.e2e.conftest import Starter
from tests.e2e.processes import ServiceProcess
from tests.worker_service.device_faults import BYSTANDERS, faulty_worker, generate, lose_device
from tests.worker_service.faulty_worker import HOSTILE


@asynccontextmanager
async def running(
    start: Starter, folder: Path, model: Path, fault: str, **settings: object
) -> AsyncIterator[ServiceProcess]:
    worker = faulty_worker(folder, model, start.cache().address, fault, "cpu", **settings)
    try:
        worker.start()
        yield worker
    finally:
        worker.kill()


@pytest.mark.parametrize("fault", ["dead", "hang"])
async def test_a_worker_without_its_device_says_so_and_ends_with_code_1(
    start: Starter, tmp_path: Path, model: Path, fault: str
) -> None:
    async with running(start, tmp_path, model, fault, launch_timeout_s=3) as worker:
        outcome = await lose_device(worker)
        assert outcome.codes == [grpc.StatusCode.UNAVAILABLE] * 5
        assert outcome.not_serving_s < 1.0
        assert outcome.exit_code == 1
        last = worker.logged().splitlines()[-1]
        assert last.startswith("worker_service: error:")
        assert ("did not return within 3 s" if fault == "hang" else "device-side assert triggered") in last


async def test_what_does_not_fit_into_memory_together_runs_apart(start: Starter, tmp_path: Path, model: Path) -> None:
    async with running(start, tmp_path, model, "memory") as worker:
        alone = [await generate(worker.address, prompt, 60, salt="alone") for prompt in BYSTANDERS]
        assert await asyncio.gather(*(generate(worker.address, prompt, 60) for prompt in BYSTANDERS)) == alone
        assert "rows failed" in worker.logged()
        assert "OutOfMemoryError" in worker.logged()


async def test_a_supervisor_brings_a_worker_back_whose_device_was_lost(
    start: Starter, tmp_path: Path, model: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    spare = faulty_worker(tmp_path, model, start.cache().address, "dead", "cpu", listen=address)
    environment = {f"STEMCACHE_WORKER_{key.upper()}": str(value) for key, value in spare.settings.items()}
    module = "tests.worker_service.faulty_worker"
    spec = ChildSpec(
        "worker",
        (sys.executable, "-m", module),
        lambda: wait_serving(address),
        {**environment, **spare.environment, "OMP_NUM_THREADS": "1"},
    )
    events: list[str] = []
    async with Supervisor(tmp_path / "logs", events.append) as supervisor:
        child = await supervisor.start(spec)
        answer = await generate(address, BYSTANDERS[0], 8)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await generate(address, HOSTILE, 4)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(60):
            while not child.restarts:
                await asyncio.sleep(0.05)
            await wait_serving(address)
        assert await generate(address, BYSTANDERS[0], 8) == answer
        assert any("ended with code 1" in event for event in events)
