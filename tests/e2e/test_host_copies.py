"""How much of what was in use is within reach when its worker has died: after its time to live, a flush, a restart."""

from __future__ import annotations

import asyncio

from tests.e2e.client import Client, nothing_is_held
from tests.e2e.conftest import Starter
from tests.e2e.running import Draw
from tests.e2e.test_host_tier import FETCHABLE, LENGTH, PAGES, VALUES, Pair, spill
from tests.redis_process import RedisProcess

TTL_S = 4


async def ask_for(client: Client, pair: Pair, prompts: list[list[int]], seconds: float) -> None:
    """Each prompt once a second; each is found on the device."""
    async with asyncio.timeout(seconds + 30):
        for _ in range(int(seconds)):
            for prompt in prompts:
                assert (await client.generate(pair.here, prompt, 1)).usage.cached_tokens >= FETCHABLE
            await asyncio.sleep(1)


async def test_copies_of_what_is_in_use_outlive_their_ttl_and_a_flush(
    client: Client, start: Starter, redis: RedisProcess, draw: Draw
) -> None:
    pair = Pair(start, redis, cache={"host_ttl_s": TTL_S})
    prompts = [draw(LENGTH) for _ in range(4)]
    forgotten = draw(LENGTH)
    await spill(client, pair.cache.address, pair.here, forgotten)
    tokens = [await spill(client, pair.cache.address, pair.here, prompt) for prompt in prompts]
    with redis.client() as connection:
        await ask_for(client, pair, prompts, 2.5 * TTL_S)
        keys = len(list(connection.scan_iter(VALUES)))
        assert PAGES * len(prompts) <= keys < PAGES * (len(prompts) + 1), "what nobody asks for ends"
        connection.flushall()
        await client.until(pair.cache.address, lambda stats: stats.host_tier.num_rows == 0)
        await ask_for(client, pair, prompts, 3)
        await client.until(pair.cache.address, lambda stats: stats.host_tier.num_rows >= PAGES * len(prompts))
        await ask_for(client, pair, prompts, 1.5 * TTL_S)
    pair.workers[0].kill()
    for prompt, expected in zip(prompts, tokens, strict=True):
        answer = await client.generate(pair.there, prompt)
        assert answer.counts == (0, FETCHABLE, LENGTH - FETCHABLE)
        cold = await client.cold(pair.there, prompt)
        assert answer.tokens == cold.tokens == expected


async def test_the_quota_drops_tails_before_heads_after_a_restart_too(
    client: Client, start: Starter, redis: RedisProcess, draw: Draw
) -> None:
    # 255 of the model's pages; each prompt is spilled in four orders. No fetch is given up on a busy machine.
    pair = Pair(start, redis, cache={"host_quota_mb": 8, "transfer_pages": 8}, host_timeout_s=10)
    old, new = [draw(LENGTH) for _ in range(7)], [draw(LENGTH) for _ in range(3)]
    tokens = [await spill(client, pair.cache.address, pair.here, prompt) for prompt in old]
    num_old = PAGES * len(old)
    pair.cache.kill()
    pair.cache.settings["listen"] = pair.cache.address
    await asyncio.to_thread(pair.cache.start)
    await client.until(pair.cache.address, lambda stats: stats.host_tier.num_rows == num_old and bool(stats.workers))
    for prompt in new:
        await client.generate(pair.here, prompt)
    num_new = PAGES * len(new)
    stats = await client.until(
        pair.cache.address, lambda stats: nothing_is_held(stats) and stats.host_tier.num_spilled_pages >= num_new
    )
    assert stats.host_tier.num_spilled_pages == num_new, "what the store has is not written again"
    left = stats.host_tier.num_rows - num_new
    assert num_old / 2 < left < num_old, "the quota was reached"
    fetched: list[int] = []
    # Newest first: what is computed again is spilled again, and drops what is next in the order.
    for prompt, expected in zip(reversed(old), reversed(tokens), strict=True):
        answer = await client.generate(pair.there, prompt)
        assert answer.tokens == expected
        fetched.append(answer.usage.fetched_tokens // 16)
    assert sum(fetched) >= 0.95 * left, f"{fetched} of {left} pages are within reach"
