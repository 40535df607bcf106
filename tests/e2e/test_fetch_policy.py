"""The automatic fetch policy through both services: a worker that reaches Redis slowly computes, and everybody can see
why nothing is fetched."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

from protos.v1 import cache_pb2, types_pb2, worker_pb2
from tests.e2e.client import Client, nothing_is_held, unused_salt
from tests.e2e.conftest import Starter
from tests.e2e.processes import ServiceProcess
from tests.e2e.proxy import open_proxy
from tests.e2e.running import Draw
from tests.e2e.states import PAGE, make_states
from tests.redis_process import RedisProcess

LENGTH, ANSWER = 333, 16
WHOLE = LENGTH // PAGE * PAGE
# For each 64 KiB on their way to or from Redis: 320 tokens take some seconds then, and a moment to compute.
DELAY_S = 0.1


async def measured(client: Client, cache: ServiceProcess, name: str) -> cache_pb2.Rates:
    """The worker's rates, once it has told how fast it computes and how fast it spills."""

    def rates(stats: cache_pb2.StatsResponse) -> cache_pb2.Rates:
        return next(worker.rates for worker in stats.workers if worker.worker_id == name)

    stats = await client.until(
        cache.address,
        lambda stats: bool(rates(stats).prefill_tokens_per_s and rates(stats).spill_bytes_per_s),
    )
    return rates(stats)


async def test_a_worker_far_from_redis_computes_what_it_could_fetch(
    client: Client, start: Starter, draw: Draw, model: Path, redis: RedisProcess, tmp_path: Path
) -> None:
    make_states(tmp_path / "states", model / "tokenizer.json")
    cache = start.cache(redis_url=redis.url, spill="write_through", fetch="auto")
    (here,) = start.workers(cache.address, 1, model=tmp_path / "states", host_tier="redis", redis_url=redis.url)
    async with open_proxy(f"127.0.0.1:{redis.port}") as proxy:
        far_url = f"redis://:{redis.password}@{proxy.address}/0"
        settings = {"host_tier": "redis", "redis_url": far_url, "host_timeout_s": 60}
        # In a thread: its way to Redis leads through this event loop.
        (far,) = await asyncio.to_thread(start.workers, cache.address, 1, 2, model=tmp_path / "states", **settings)
        proxy.delay_s = DELAY_S
        prompt = draw(LENGTH)
        first = await client.generate(here.address, prompt, ANSWER)
        await client.until(cache.address, lambda stats: stats.host_tier.num_rows >= WHOLE // PAGE)
        # Its own pages go to Redis slowly, so the rate is known before anything was fetched.
        await client.generate(far.address, draw(100), 4, salt=unused_salt())
        rates = await measured(client, cache, "worker-2")
        assert rates.fetch_bytes_per_s == 0
        described = await client.worker(far.address).Describe(worker_pb2.DescribeRequest())
        request = cache_pb2.ExplainRequest(
            namespace=described.namespace, tokens=array("i", prompt).tobytes(), worker_id="worker-2"
        )
        (told,) = (await client.cache(cache.address).Explain(request)).workers
        assert told.match.host_tokens == WHOLE
        assert told.match.miss_reason == types_pb2.MISS_REASON_FETCH_SLOWER
        assert any("computed and not fetched" in note for note in told.notes)
        answer = await client.generate(far.address, prompt, ANSWER)
        assert answer.counts == (0, 0, LENGTH)
        assert answer.usage.miss_reason == types_pb2.MISS_REASON_FETCH_SLOWER
        assert answer.tokens == first.tokens
        proxy.delay_s = 0.0
        stats = await client.until(cache.address, nothing_is_held)
        worker = next(worker for worker in stats.workers if worker.worker_id == "worker-2")
        assert (worker.declined_tokens, worker.fetched_tokens, worker.misses["fetch_slower"]) == (WHOLE, 0, 1)
