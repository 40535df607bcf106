"""The admin addresses: what is served there and nowhere else, and a Drain that ends the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.v1 import cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.client import open_channel
from session.limits import MAX_MESSAGE_BYTES
from tests.e2e.client import Client
from tests.e2e.conftest import Starter
from tests.e2e.processes import ServiceProcess


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def services_at(address: str) -> set[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with open_channel(address, MAX_MESSAGE_BYTES) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for response in stub.ServerReflectionInfo(iter([request])):
            return {service.name for service in response.list_services_response.service}
    return set()


async def test_admin_calls_are_served_on_the_admin_addresses_only(start: Starter) -> None:
    cache = start.cache()
    (worker,) = start.workers(cache.address)
    calls: list[tuple[ServiceProcess, str, Callable[[grpc.aio.Channel], Any]]] = [
        (cache, "CacheAdmin", lambda c: cache_pb2_grpc.CacheAdminStub(c).Clear(cache_pb2.ClearRequest())),
        (worker, "WorkerAdmin", lambda c: worker_pb2_grpc.WorkerAdminStub(c).Drain(worker_pb2.DrainRequest())),
    ]
    for service, name, call in calls:
        assert service.announced["admin"].startswith("127.0.0.1:")
        async with (
            open_channel(service.address, MAX_MESSAGE_BYTES) as public,
            open_channel(service.announced["admin"], MAX_MESSAGE_BYTES) as admin,
        ):
            assert await code_of(call(public)) is grpc.StatusCode.UNIMPLEMENTED
            health = health_pb2_grpc.HealthStub(admin)
            response = await health.Check(health_pb2.HealthCheckRequest(service=f"stemcache.v1.{name}"))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
            assert await code_of(call(admin)) is grpc.StatusCode.OK
        assert f"stemcache.v1.{name}" not in await services_at(cache.address)
    assert "stemcache.v1.CacheAdmin" in await services_at(cache.announced["admin"])


async def test_a_drain_finishes_what_runs_says_goodbye_and_ends_the_process(start: Starter, client: Client) -> None:
    cache = start.cache(grace_ms=60_000)
    (worker,) = start.workers(cache.address)
    running = asyncio.create_task(client.generate(worker.address, list(range(40)), 60))
    await client.until(cache.address, lambda stats: any(worker.num_leases for worker in stats.workers))
    drained = await client.worker_admin(worker.announced["admin"]).Drain(worker_pb2.DrainRequest(), timeout=60)
    assert (drained.num_finished, drained.num_aborted) == (1, 0)
    assert len((await running).tokens) == 60
    assert await asyncio.to_thread(worker.wait, 30) == 0
    # A Goodbye: with it the leases end at once and not with the grace period.
    stats = await client.until(cache.address, lambda stats: not any(worker.connected for worker in stats.workers), 5)
    assert not any(worker.num_leases for worker in stats.workers)


@pytest.mark.parametrize("listen", ["", "127.0.0.1:0"])
async def test_the_admin_address_is_announced_unless_there_is_none(start: Starter, listen: str) -> None:
    cache = start.cache(admin_listen=listen)
    assert ("admin" in cache.announced) == bool(listen)
