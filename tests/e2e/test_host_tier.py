"""Pages through a real Redis: fetched elsewhere, tampered with, lost, refused or late. No answer ever changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from protos.v1 import cache_pb2
from tests.e2e.client import Client, nothing_is_held, unused_salt
from tests.e2e.conftest import Cluster, Starter
from tests.e2e.processes import ServiceProcess
from tests.e2e.proxy import open_proxy
from tests.redis_process import RedisProcess

Draw = Callable[[int], list[int]]
LENGTH = 470
PAGES = LENGTH // 16
FETCHABLE = PAGES * 16
VALUES = "stemcache:1:*:*"


def spilled(num_rows: int) -> Callable[[cache_pb2.StatsResponse], bool]:
    return lambda stats: stats.host_tier.num_rows >= num_rows and nothing_is_held(stats)


async def spill(client: Client, cache: str, worker: str, prompt: Sequence[int]) -> list[int]:
    """Run a prompt and wait until its pages are in the host tier; returns the answer."""
    rows = (await client.stats(cache)).host_tier.num_rows
    answer = await client.generate(worker, prompt)
    await client.until(cache, spilled(rows + PAGES))
    return answer.tokens


async def test_the_other_worker_fetches_what_this_one_computed(client: Client, cluster: Cluster, draw: Draw) -> None:
    prompt, (here, there) = draw(LENGTH), cluster.workers
    tokens = await spill(client, cluster.cache, here, prompt)
    before = await client.worker_stats(cluster.cache, "worker-2")
    fetched = await client.generate(there, prompt)
    again = await client.generate(there, prompt)
    cold = await client.cold(there, prompt)
    assert fetched.counts == (0, FETCHABLE, LENGTH - FETCHABLE)
    assert again.counts == (FETCHABLE, 0, LENGTH - FETCHABLE)
    assert fetched.tokens == again.tokens == cold.tokens == tokens
    after = await client.worker_stats(cluster.cache, "worker-2")
    assert after.fetched_tokens - before.fetched_tokens == FETCHABLE


async def test_device_and_host_each_bring_their_part(client: Client, cluster: Cluster, draw: Draw) -> None:
    prompt, (here, there) = draw(LENGTH), cluster.workers
    tokens = await spill(client, cluster.cache, here, prompt)
    await client.generate(there, prompt[:100], 1)
    answer = await client.generate(there, prompt)
    assert answer.counts == (96, FETCHABLE - 96, LENGTH - FETCHABLE)
    assert answer.tokens == tokens


async def test_another_tenant_fetches_nothing(client: Client, cluster: Cluster, draw: Draw) -> None:
    prompt, (here, there) = draw(LENGTH), cluster.workers
    await spill(client, cluster.cache, here, prompt)
    assert (await client.generate(there, prompt, salt=unused_salt())).counts == (0, 0, LENGTH)


@pytest.mark.parametrize("num_tampered", [1, PAGES])
async def test_a_tampered_value_is_a_miss(client: Client, cluster: Cluster, draw: Draw, num_tampered: int) -> None:
    prompt, (here, there) = draw(LENGTH), cluster.workers
    with cluster.redis.client() as redis:
        old = set(redis.scan_iter(VALUES))
        tokens = await spill(client, cluster.cache, here, prompt)
        fresh = sorted(set(redis.scan_iter(VALUES)) - old)[:num_tampered]
        assert len(fresh) == num_tampered
        for key in fresh:
            value = redis.get(key)
            assert isinstance(value, bytes)
            redis.set(key, value[:-1] + bytes([value[-1] ^ 1]), keepttl=True)
    corrupt = (await client.stats(cluster.cache)).host_tier.num_corrupt_pages
    answer = await client.generate(there, prompt)
    assert answer.tokens == tokens
    assert sum(answer.counts) == LENGTH
    assert answer.usage.fetched_tokens <= (PAGES - num_tampered) * 16
    assert (await client.stats(cluster.cache)).host_tier.num_corrupt_pages > corrupt
    await client.idle(cluster.cache)


class Pair:
    """Two workers on a Redis of this test's own."""

    def __init__(
        self,
        start: Starter,
        redis: RedisProcess,
        worker_url: str = "",
        cache: dict[str, object] | None = None,
        **settings: object,
    ) -> None:
        settings_of_cache = {"redis_url": redis.url, "spill": "write_through", "fetch": "always"} | (cache or {})
        self.cache: ServiceProcess = start.cache(**settings_of_cache)
        url = worker_url or redis.url
        settings_of_workers = {"host_tier": "redis", "redis_url": url, "host_timeout_s": 0.5} | settings
        self.workers = start.workers(self.cache.address, 2, **settings_of_workers)
        self.here, self.there = (worker.address for worker in self.workers)

    def check_running(self) -> None:
        assert all(process.is_running() for process in (self.cache, *self.workers))


async def test_a_fetch_in_several_tickets_and_rounds_brings_the_same_pages(
    client: Client, start: Starter, redis: RedisProcess, draw: Draw
) -> None:
    pair, prompt = Pair(start, redis, cache={"transfer_pages": 3, "max_open_tickets": 4}), draw(LENGTH)
    tokens = await spill(client, pair.cache.address, pair.here, prompt)
    answer = await client.generate(pair.there, prompt)
    assert answer.tokens == tokens
    assert answer.counts == (0, PAGES * 16, LENGTH - PAGES * 16)
    again = await client.generate(pair.there, prompt)
    assert again.tokens == tokens and again.usage.fetched_tokens == 0
    pair.check_running()


async def test_a_flushed_redis_is_a_miss_and_then_used_again(
    client: Client, start: Starter, redis: RedisProcess, draw: Draw
) -> None:
    pair, prompt = Pair(start, redis), draw(LENGTH)
    tokens = await spill(client, pair.cache.address, pair.here, prompt)
    with redis.client() as connection:
        connection.flushall()
    answer = await client.generate(pair.there, prompt)
    assert answer.tokens == tokens
    assert answer.counts == (0, 0, LENGTH)
    await client.until(pair.cache.address, nothing_is_held)
    await fetch_something(client, pair, draw)
    pair.check_running()


async def test_a_killed_redis_costs_hits_only_and_is_used_again_when_it_is_back(
    client: Client, start: Starter, redis: RedisProcess, draw: Draw
) -> None:
    pair, prompt = Pair(start, redis), draw(LENGTH)
    tokens = await spill(client, pair.cache.address, pair.here, prompt)
    redis.kill()
    for _ in range(2):
        answer = await client.generate(pair.there, prompt)
        assert answer.tokens == tokens
        assert answer.usage.fetched_tokens == 0
    stats = await client.until(pair.cache.address, lambda stats: stats.host_tier.breaker_open)
    assert stats.host_tier.breaker_open
    unseen = await client.generate(pair.there, draw(200))
    assert unseen.counts == (0, 0, 200)
    redis.start()
    await client.until(pair.cache.address, lambda stats: not stats.host_tier.breaker_open)
    await client.idle(pair.cache.address)
    await fetch_something(client, pair, draw)
    pair.check_running()


async def fetch_something(client: Client, pair: Pair, draw: Draw) -> None:
    """New prompts until one is fetched: after a fault, spills start again only when the breaker lets them."""
    for _ in range(40):
        prompt = draw(LENGTH)
        tokens = (await client.generate(pair.here, prompt)).tokens
        await client.idle(pair.cache.address)
        answer = await client.generate(pair.there, prompt)
        assert answer.tokens == tokens
        if answer.usage.fetched_tokens:
            return
    raise AssertionError("the host tier was never used again")


async def test_a_full_redis_keeps_what_it_has_and_refuses_the_rest(
    client: Client, start: Starter, redis: RedisProcess, draw: Draw
) -> None:
    pair, prompts = Pair(start, redis), [draw(LENGTH) for _ in range(3)]
    # The first spill opens the connections: their buffers count as used memory too.
    tokens = [await spill(client, pair.cache.address, pair.here, prompts[0])]
    with redis.client() as connection:
        used = connection.info("memory")["used_memory"]  # type: ignore[index]
        connection.config_set("maxmemory", used + 20 * 33_000)
        connection.config_set("maxmemory-policy", "noeviction")
        tokens += [(await client.generate(pair.here, prompt)).tokens for prompt in prompts[1:]]
        stats = await client.idle(pair.cache.address)
        assert PAGES <= stats.host_tier.num_rows < 3 * PAGES
        assert len(list(connection.scan_iter(VALUES))) < 3 * PAGES
    elsewhere = [await client.generate(pair.there, prompt) for prompt in prompts]
    assert [answer.tokens for answer in elsewhere] == tokens
    assert [sum(answer.counts) for answer in elsewhere] == [LENGTH] * 3
    assert elsewhere[0].usage.fetched_tokens == FETCHABLE
    pair.check_running()


async def test_a_worker_that_starts_while_redis_is_full_fetches_what_it_has(
    client: Client, start: Starter, redis: RedisProcess, draw: Draw
) -> None:
    pair, prompt = Pair(start, redis), draw(LENGTH)
    tokens = await spill(client, pair.cache.address, pair.here, prompt)
    with redis.client() as connection:
        connection.config_set("maxmemory", 1)
    settings = {"host_tier": "redis", "redis_url": redis.url}
    (late,) = await asyncio.to_thread(start.workers, pair.cache.address, 1, 3, **settings)
    answer = await client.generate(late.address, prompt)
    assert answer.tokens == tokens
    assert answer.counts == (0, FETCHABLE, LENGTH - FETCHABLE)


async def test_a_slow_or_stalled_redis_delays_nobody_for_good(
    client: Client, start: Starter, redis: RedisProcess, draw: Draw
) -> None:
    async with open_proxy(f"127.0.0.1:{redis.port}") as proxy:
        url = redis.url.replace(str(redis.port), str(proxy.port))
        # In a thread: the workers ask the proxy, which runs in this loop, before they serve.
        pair, prompt, other = await asyncio.to_thread(Pair, start, redis, url), draw(LENGTH), draw(LENGTH)
        tokens = await spill(client, pair.cache.address, pair.here, prompt)
        other_tokens = await spill(client, pair.cache.address, pair.here, other)
        proxy.delay_s = 0.01
        slow = await client.generate(pair.there, prompt)
        assert slow.tokens == tokens
        assert slow.counts == (0, FETCHABLE, LENGTH - FETCHABLE)
        proxy.is_open.clear()
        stalled = await client.generate(pair.there, other)
        assert stalled.tokens == other_tokens
        assert stalled.counts == (0, 0, LENGTH)
        unseen = await client.generate(pair.here, draw(200))
        assert unseen.counts == (0, 0, 200)
        await client.idle(pair.cache.address)
        pair.check_running()


async def test_a_worker_finds_a_redis_that_comes_later(
    client: Client, start: Starter, redis: RedisProcess, draw: Draw
) -> None:
    redis.kill()
    pair = Pair(start, redis)
    assert (await client.generate(pair.here, draw(100))).counts == (0, 0, 100)
    redis.start()
    prompt = draw(LENGTH)
    tokens = (await client.generate(pair.here, prompt)).tokens
    await fetch_something(client, pair, draw)
    assert (await client.generate(pair.there, prompt)).tokens == tokens


async def test_pages_evicted_from_the_device_come_back_from_the_workers_own_memory(
    client: Client, start: Starter, draw: Draw
) -> None:
    cache = start.cache(spill="write_through", fetch="always")
    worker = start.workers(cache.address, host_tier="memory", pool_pages=40, max_model_len=600, token_budget=256)[0]
    prompt = draw(LENGTH)
    tokens = await spill(client, cache.address, worker.address, prompt)
    for _ in range(3):
        await client.generate(worker.address, draw(LENGTH))
        await client.idle(cache.address)
    answer = await client.generate(worker.address, prompt)
    assert answer.tokens == tokens
    assert answer.usage.fetched_tokens > 0
    assert sum(answer.counts) == LENGTH
