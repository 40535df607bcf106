"""Requests that are cancelled at every stage leave no lease, no ticket and no page behind."""

from __future__ import annotations

import asyncio

import pytest

from protos.v1 import cache_pb2
from tests.e2e.client import Client
from tests.e2e.conftest import Cluster, Starter
from tests.e2e.proxy import open_proxy
from tests.e2e.running import Draw, healthy
from tests.redis_process import RedisProcess

LENGTH = 470


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.01, 0.03, 0.1, 0.3])
async def test_a_call_that_is_cancelled_after_any_time(
    client: Client, cluster: Cluster, draw: Draw, delay_s: float
) -> None:
    calls = [client.stream(worker, draw(700), 5000) for worker in cluster.workers for _ in range(3)]
    readers = [asyncio.create_task(call.read()) for call in calls]
    await asyncio.sleep(delay_s)
    for call in calls:
        call.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await client.until(cluster.cache, healthy)


async def test_the_one_that_siblings_wait_for_is_cancelled(client: Client, cluster: Cluster, draw: Draw) -> None:
    prompt, worker = draw(3000), cluster.workers[0]
    first = client.stream(worker, prompt, 8)
    reader = asyncio.create_task(first.read())
    siblings = [asyncio.create_task(client.generate(worker, prompt)) for _ in range(3)]
    await client.until(cluster.cache, lambda stats: any(w.num_leases for w in stats.workers))
    first.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    answers = await asyncio.gather(*siblings)
    assert all(answer.tokens == answers[0].tokens for answer in answers)
    assert all(sum(answer.counts) == len(prompt) for answer in answers)
    await client.until(cluster.cache, healthy)


async def test_a_request_is_cancelled_while_it_waits_for_room(client: Client, start: Starter, draw: Draw) -> None:
    cache = start.cache()
    worker = start.workers(cache.address, pool_pages=64, max_model_len=1000, token_budget=512)[0].address
    first = client.stream(worker, draw(600), 300)
    await first.read()
    waiting = client.stream(worker, draw(600), 8)
    reader = asyncio.create_task(waiting.read())
    await client.until(cache.address, lambda stats: stats.workers[0].num_refusals > 0)
    waiting.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    first.cancel()
    await client.until(cache.address, healthy)
    assert (await client.generate(worker, draw(600))).counts == (0, 0, 600)


async def test_a_request_is_cancelled_while_its_pages_are_fetched(
    client: Client, start: Starter, redis: RedisProcess, draw: Draw
) -> None:
    async with open_proxy(f"127.0.0.1:{redis.port}") as proxy:
        cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always")
        tier = {"host_tier": "redis", "host_timeout_s": 20}
        here = start.workers(cache.address, redis_url=redis.url, **tier)[0].address
        slow_url = redis.url.replace(str(redis.port), str(proxy.port))
        there = (await asyncio.to_thread(start.workers, cache.address, 1, 2, redis_url=slow_url, **tier))[0].address
        prompt = draw(LENGTH)
        tokens = (await client.generate(here, prompt)).tokens
        await client.until(cache.address, lambda stats: stats.host_tier.num_rows >= LENGTH // 16)
        await client.idle(cache.address)
        proxy.is_open.clear()
        call = client.stream(there, prompt, 8)
        reader = asyncio.create_task(call.read())
        await client.until(cache.address, lambda stats: fetches(stats) > 0)
        call.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        other = await client.generate(there, draw(100))
        assert other.counts == (0, 0, 100)
        assert fetches(await client.stats(cache.address)) > 0, "the ticket was closed before its ack"
        proxy.is_open.set()
        await client.until(cache.address, healthy)
        again = await client.generate(there, prompt)
        assert again.tokens == tokens
        assert sum(again.counts) == LENGTH


def fetches(stats: cache_pb2.StatsResponse) -> int:
    return sum(worker.num_tickets for worker in stats.workers if worker.worker_id == "worker-2")


async def test_the_pools_are_empty_after_clear(client: Client, cluster: Cluster, draw: Draw) -> None:
    await client.generate(cluster.workers[0], draw(100))
    await client.idle(cluster.cache)
    cleared = await client.cache_admin(cluster.cache_admin).Clear(cache_pb2.ClearRequest(), timeout=20)
    assert cleared.num_pages > 0
    stats = await client.stats(cluster.cache)
    groups = [group for worker in stats.workers for group in worker.groups]
    assert all(group.num_free == group.num_pages for group in groups)
