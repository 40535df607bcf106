"""Users, and a seeded source of trouble for everything around the workers: cut, stall, freeze, kill, flush.

No worker may end, no request may fail, no answer may differ from a quiet run, and nothing may be held in the end.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from tests.e2e.client import Client, unused_salt
from tests.e2e.conftest import Starter
from tests.e2e.processes import ServiceProcess
from tests.e2e.proxy import Proxy, open_proxy
from tests.e2e.running import healthy
from tests.examples import THOROUGH
from tests.redis_process import RedisProcess

ANSWER = 60
NUM_TROUBLES = 24 if THOROUGH else 15
NUM_USERS = 8


class Trouble:
    """One kind of trouble after the other, as the seed says."""

    def __init__(self, seed: int, cache: ServiceProcess, proxy: Proxy, redis: RedisProcess) -> None:
        self._random = random.Random(seed)
        self._cache = cache
        self._proxy = proxy
        self._redis = redis
        self.is_over = False

    async def run(self) -> None:
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._proxy.cut,
            self._stall_session,
            self._freeze_cache,
            self._restart_cache,
            self._restart_redis,
            self._flush_redis,
        ]
        try:
            for at in range(NUM_TROUBLES):
                await asyncio.sleep(self._random.uniform(0.1, 0.6))
                # Each kind once, then whatever comes.
                await (kinds[at] if at < len(kinds) else self._random.choice(kinds))()
        finally:
            self.is_over = True

    async def _pause(self, most_s: float) -> None:
        await asyncio.sleep(self._random.uniform(0.0, most_s))

    async def _stall_session(self) -> None:
        self._proxy.is_open.clear()
        await self._pause(1.3)
        self._proxy.is_open.set()

    async def _freeze_cache(self) -> None:
        self._cache.freeze()
        await self._pause(1.3)
        self._cache.thaw()

    async def _restart_cache(self) -> None:
        self._cache.kill()
        self._cache.settings["listen"] = self._cache.address
        await self._pause(0.6)
        await asyncio.to_thread(self._cache.start)

    async def _restart_redis(self) -> None:
        self._redis.kill()
        await self._pause(0.6)
        await asyncio.to_thread(self._redis.start)

    async def _flush_redis(self) -> None:
        with self._redis.client() as connection:
            connection.flushall()


class Users:
    """Ask for prompts with shared beginnings, compare every answer, and sometimes hang up."""

    def __init__(self, seed: int, client: Client, workers: list[str]) -> None:
        self._random = random.Random(seed)
        self._client = client
        self._workers = workers
        shared = [self._tokens(length) for length in (64, 200, 330)]
        self._prompts = [self._random.choice(shared) + self._tokens(self._random.randrange(1, 200)) for _ in range(12)]
        self._answers: list[list[int]] = []
        self.counts: Counter[str] = Counter()

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(256) for _ in range(count)]

    async def learn(self) -> None:
        """Every prompt's answer while all is quiet, cold."""
        for prompt in self._prompts:
            answer = await self._client.generate(self._workers[0], prompt, ANSWER, salt=unused_salt())
            self._answers.append(answer.tokens)

    async def run(self, number: int, trouble: Trouble) -> None:
        choose = random.Random(number)
        while not trouble.is_over:
            at, worker = choose.randrange(len(self._prompts)), choose.choice(self._workers)
            if choose.random() < 0.2:
                await self._hang_up(worker, at, choose.uniform(0.0, 0.2))
            else:
                await self._check(worker, at, choose.choice((5, 20, ANSWER)))

    async def _hang_up(self, worker: str, at: int, after_s: float) -> None:
        call = self._client.stream(worker, self._prompts[at], ANSWER)
        reader = asyncio.create_task(call.read())
        await asyncio.sleep(after_s)
        call.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        self.counts["aborted"] += 1

    async def _check(self, worker: str, at: int, max_tokens: int) -> None:
        answer = await self._client.generate(worker, self._prompts[at], max_tokens)
        assert answer.tokens == self._answers[at][:max_tokens]
        if not answer.usage.num_preemptions:
            assert sum(answer.counts) == len(self._prompts[at])
        self.counts.update(finished=1, cached=answer.usage.cached_tokens, fetched=answer.usage.fetched_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3])
async def test_answers_stay_right_whatever_happens_around_the_workers(
    client: Client, start: Starter, redis: RedisProcess, seed: int
) -> None:
    cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always", grace_ms=400)
    settings = {"pool_pages": 80, "max_model_len": 1200, "token_budget": 256, "reply_timeout_s": 1.0}
    tier = {"host_tier": "redis", "redis_url": redis.url, "host_timeout_s": 0.5}
    async with open_proxy(cache.address) as proxy:
        workers = await asyncio.to_thread(start.workers, proxy.address, 2, **settings, **tier)
        users = Users(seed, client, [worker.address for worker in workers])
        await users.learn()
        trouble = Trouble(seed, cache, proxy, redis)
        async with asyncio.TaskGroup() as group:
            group.create_task(trouble.run())
            for number in range(NUM_USERS):
                group.create_task(users.run(number, trouble))
        await client.until(cache.address, lambda stats: len(stats.workers) == 2 and healthy(stats))
        assert all(worker.is_running() for worker in workers)
        for worker in workers:
            assert '"level": "error"' not in worker.logged()
        assert users.counts["finished"] > 20
        assert users.counts["cached"] > 0
