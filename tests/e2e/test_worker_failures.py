"""Workers that die, come back, are replaced or told to end while requests run."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.v1 import worker_pb2
from rpc.client import open_channel
from rpc.options import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS
from session.limits import MAX_MESSAGE_BYTES
from tests.e2e.client import Client
from tests.e2e.conftest import Starter
from tests.e2e.processes import ServiceProcess
from tests.e2e.running import Draw, healthy


async def test_a_killed_workers_request_is_answered_by_the_other_one(
    client: Client, start: Starter, draw: Draw
) -> None:
    cache = start.cache(grace_ms=500)
    victim, other = start.workers(cache.address, 2)
    prompt = draw(200)
    decoding = asyncio.Event()
    request = asyncio.create_task(
        client.generate(victim.address, prompt, 2000, on_token=lambda count: decoding.set() if count > 3 else None)
    )
    await decoding.wait()
    victim.kill()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await request
    assert error.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
    retried = await client.generate(other.address, prompt, 30)
    assert retried.tokens == (await client.cold(other.address, prompt, 30)).tokens
    await client.until(cache.address, lambda stats: [w.worker_id for w in stats.workers] == ["worker-2"])
    victim.start()
    again = await client.generate(victim.address, prompt, 30)
    assert again.tokens == retried.tokens
    assert again.counts == (0, 0, 200)
    await client.until(cache.address, healthy)


async def test_a_worker_that_restarts_within_its_grace_period_replaces_itself(
    client: Client, start: Starter, draw: Draw
) -> None:
    cache = start.cache(grace_ms=60_000)
    worker = start.workers(cache.address)[0]
    call = client.stream(worker.address, draw(100), 5000)
    await call.read()
    worker.kill()
    call.cancel()
    worker.start()
    assert (await client.generate(worker.address, draw(50))).counts == (0, 0, 50)
    stats = await client.until(cache.address, healthy)
    assert [w.incarnation for w in stats.workers] == [worker.announced["incarnation"]]


async def test_sigterm_lets_running_requests_finish_and_says_goodbye(
    client: Client, start: Starter, draw: Draw
) -> None:
    cache = start.cache(grace_ms=600_000)
    worker = start.workers(cache.address)[0]
    prompt = draw(60)
    decoding = asyncio.Event()
    running = asyncio.create_task(
        client.generate(worker.address, prompt, 150, on_token=lambda count: decoding.set() if count > 3 else None)
    )
    await decoding.wait()
    ending = asyncio.create_task(asyncio.to_thread(worker.terminate))
    answer = await running
    assert len(answer.tokens) == 150
    assert await ending == 0
    # Without a Goodbye, the worker would stay for its grace period.
    await client.until(cache.address, lambda stats: not stats.workers)


async def test_a_second_worker_of_the_same_name_takes_over(client: Client, start: Starter, draw: Draw) -> None:
    cache = start.cache()
    older = start.workers(cache.address)[0]
    newer = start.workers(cache.address)[0]
    await gone(older)
    assert "took over" in older.logged()
    assert (await client.generate(newer.address, draw(50))).counts == (0, 0, 50)


async def gone(process: ServiceProcess) -> None:
    async with asyncio.timeout(30):
        while process.is_running():
            await asyncio.sleep(0.02)


async def test_a_worker_serves_only_once_there_is_a_cache_service(client: Client, start: Starter, draw: Draw) -> None:
    cache = start.cache()
    address = cache.address
    cache.kill()
    worker = start.workers(address)[0]
    assert await health(worker.address) == health_pb2.HealthCheckResponse.NOT_SERVING
    waiting = asyncio.create_task(client.generate(worker.address, draw(40)))
    cache.settings["listen"] = address
    await asyncio.to_thread(cache.start)
    assert (await waiting).counts == (0, 0, 40)
    assert await health(worker.address) == health_pb2.HealthCheckResponse.SERVING
    running = asyncio.create_task(client.generate(worker.address, draw(40), 1000))
    await client.until(cache.address, lambda stats: any(w.num_leases for w in stats.workers))
    drain = client.worker_admin(worker.announced["admin"]).Drain(worker_pb2.DrainRequest(), timeout=60)
    async with asyncio.timeout(30):
        while await health(worker.address) != health_pb2.HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.02)
    assert (await drain).num_finished == 1
    assert len((await running).tokens) == 1000


async def health(address: str) -> int:
    async with open_channel(address, MAX_MESSAGE_BYTES) as channel:
        request = health_pb2.HealthCheckRequest(service="stemcache.v1.ModelWorker")
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
        return int(response.status)


async def test_a_frozen_worker_is_noticed_by_keepalive_and_keeps_its_pages_within_the_grace_period(
    client: Client, start: Starter, draw: Draw
) -> None:
    cache = start.cache(grace_ms=60_000)
    worker = start.workers(cache.address)[0]
    prompt = draw(100)
    tokens = (await client.generate(worker.address, prompt)).tokens
    await client.idle(cache.address)
    worker.freeze()
    noticed_s = 2 * (KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS) / 1000  # HTTP/2's own limit would take 60 s
    await client.until(cache.address, lambda stats: not stats.workers[0].connected, noticed_s)
    worker.thaw()
    await client.until(cache.address, lambda stats: stats.workers[0].connected)
    again = await client.generate(worker.address, prompt)
    assert again.counts == (96, 0, 4)
    assert again.tokens == tokens
    await client.until(cache.address, healthy)
