"""A worker's own memory as the host tier, full: beginnings of prompts stay, and what went is missed once."""

from __future__ import annotations

from tests.e2e.client import Client
from tests.e2e.conftest import Starter
from tests.e2e.running import Draw
from tests.e2e.test_host_tier import LENGTH, PAGES, spill

# Pages that 2 MiB take: of this model one has 32 KiB, and a header.
CAPACITY = 63


async def test_of_what_its_memory_dropped_a_worker_has_the_beginning(
    client: Client, start: Starter, draw: Draw
) -> None:
    """Each prompt is spilled in four orders. The service is not told what the memory drops: a fetch misses it once, and
    it is written again."""
    cache = start.cache(spill="write_through", fetch="always", transfer_pages=8)
    settings = {"pool_pages": 40, "max_model_len": 600, "token_budget": 256}
    worker = start.workers(cache.address, host_tier="memory", memory_tier_mb=2, **settings)[0]
    prompt = draw(LENGTH)
    tokens = await spill(client, cache.address, worker.address, prompt)
    for _ in range(2):  # the last one drops the first one from the device, and most of it from the memory
        await spill(client, cache.address, worker.address, draw(LENGTH))
    before = (await client.stats(cache.address)).host_tier
    answer = await client.generate(worker.address, prompt)
    num_left = CAPACITY - 2 * PAGES
    assert (answer.tokens, answer.usage.fetched_tokens) == (tokens, 16 * num_left)
    num_again = PAGES - num_left
    stats = await client.until(
        cache.address,
        lambda stats: (
            stats.host_tier.num_spilled_pages == before.num_spilled_pages + num_again
            and stats.host_tier.num_rows == 3 * PAGES
        ),
    )
    # One for each of the four tickets: their first page that has gone.
    assert stats.host_tier.num_missing_pages == before.num_missing_pages + 4
    assert not stats.host_tier.num_corrupt_pages and not stats.host_tier.breaker_open
