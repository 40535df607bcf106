"""What must come of a worker whose device is lost: seen from outside, on a CPU and on a GPU."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.v1 import worker_pb2, worker_pb2_grpc
from rpc.client import open_channel
from session.limits import MAX_MESSAGE_BYTES
from tests.e2e.processes import ServiceProcess
from tests.worker_service.faulty_worker import HOSTILE

# Bytes are tokens in the model of the tests.
BYSTANDERS = tuple(tuple(range(20 + 5 * at, 30 + 5 * at)) for at in range(4))


class Outcome(NamedTuple):
    """Seconds count from the error that the hostile request got."""

    codes: list[grpc.StatusCode]
    not_serving_s: float
    exit_s: float
    exit_code: int


def faulty_worker(folder: Path, model: Path, cache: str, fault: str, device: str, **settings: object) -> ServiceProcess:
    defaults: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "admin_listen": "",
        "cache": cache,
        "model": model,
        "device": device,
    }
    environment = {"STEMCACHE_TEST_FAULT": fault}
    return ServiceProcess(
        "tests.worker_service.faulty_worker",
        "STEMCACHE_WORKER_",
        {**defaults, "threads": 1, "pool_mb": 64, **settings},
        folder / "faulty.log",
        environment,
    )


async def generate(address: str, prompt: Sequence[int], max_tokens: int, **fields: str) -> list[int]:
    """The answer's tokens. Raises grpc.aio.AioRpcError."""
    request = worker_pb2.GenerateRequest(
        token_ids=worker_pb2.TokenIds(ids=array("i", prompt).tobytes()),
        sampling=worker_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )
    async with open_channel(address, MAX_MESSAGE_BYTES) as channel:
        stub = worker_pb2_grpc.ModelWorkerStub(channel)
        packed = b"".join([response.token_ids async for response in stub.Generate(request, timeout=120)])
    return array("i", packed).tolist()


async def lose_device(worker: ServiceProcess) -> Outcome:
    """Sends the request that kills the device beside others that decode, and waits for the worker's end."""
    running = [asyncio.create_task(generate(worker.address, prompt, 400)) for prompt in BYSTANDERS]
    await asyncio.sleep(0.5)
    hostile = asyncio.create_task(generate(worker.address, HOSTILE, 4))
    ended = await asyncio.gather(*running, hostile, return_exceptions=True)
    start_s = time.monotonic()
    codes = [error.code() for error in ended if isinstance(error, grpc.aio.AioRpcError)]
    await _not_serving(worker.address)
    not_serving_s = time.monotonic() - start_s
    exit_code = await asyncio.to_thread(worker.wait, 30)
    return Outcome(codes, not_serving_s, time.monotonic() - start_s, exit_code)


async def _not_serving(address: str) -> None:
    """Until the health check says NOT_SERVING, or nobody listens any more."""
    async with open_channel(address, MAX_MESSAGE_BYTES) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            while True:
                response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
                if response.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    return
                await asyncio.sleep(0.02)
        except grpc.aio.AioRpcError as error:
            # A server that stops while it is asked cancels the call.
            assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED), error
