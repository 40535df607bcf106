"""fp8 pages through both services and Redis: cold, cached and fetched answers are equal.

A worker with fp32 pages on the same Redis finds none of them.
"""

from __future__ import annotations

from collections.abc import Callable

from cli.client import StemcacheClient
from tests.e2e.client import Client
from tests.e2e.conftest import Starter
from tests.redis_process import RedisProcess

LENGTH = 470
FETCHABLE = LENGTH // 16 * 16


async def test_fp8_pages_are_reused_and_exchanged(
    client: Client, start: Starter, redis: RedisProcess, draw: Callable[[int], list[int]]
) -> None:
    cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always")
    tier = {"host_tier": "redis", "redis_url": redis.url}
    here, there = start.workers(cache.address, 2, kv_dtype="fp8_e4m3", **tier)
    other = start.workers(cache.address, 1, 3, **tier)[0]
    prompt = draw(LENGTH)
    first = await client.generate(here.address, prompt)
    await client.until(cache.address, lambda stats: stats.host_tier.num_rows >= LENGTH // 16)
    hit = await client.generate(here.address, prompt)
    fetched = await client.generate(there.address, prompt)
    cold = await client.cold(there.address, prompt)
    counts = [answer.counts for answer in (first, hit, fetched, cold)]
    rest = LENGTH - FETCHABLE
    assert counts == [(0, 0, LENGTH), (FETCHABLE, 0, rest), (0, FETCHABLE, rest), (0, 0, LENGTH)]
    assert first.tokens == hit.tokens == fetched.tokens == cold.tokens
    # Pages of fp32 have another fingerprint: its worker finds nothing, neither now nor when it has its own.
    assert (await client.generate(other.address, prompt)).counts == (0, 0, LENGTH)
    async with StemcacheClient(cache.address, (here.address, other.address)) as asking:
        narrow, wide = [await asking.describe(worker.address) for worker in (here, other)]
    assert [one.config["kv_dtype"] for one in (narrow, wide)] == ["fp8_e4m3", "auto"]
    assert [4 * group.page_bytes for group in narrow.groups] == [group.page_bytes for group in wide.groups]
