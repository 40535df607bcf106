"""kill -9 of the cache service, without Redis: what its workers had cached is cached again, and answers as a cold run.

Prints the share of the tokens that are cached after the kill.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest

from protos.v1 import cache_pb2, types_pb2
from tests.e2e.client import Answer, Client, nothing_is_held
from tests.e2e.conftest import Starter
from tests.e2e.kinds import make_kind
from tests.e2e.processes import ServiceProcess
from tests.e2e.running import Draw, Running, healthy
from tests.e2e.states import make_states

TENANT = "tenant"
ANSWER = 12


def cached_pages(stats: cache_pb2.StatsResponse) -> dict[str, list[int]]:
    """Returns for each worker how many pages of each group are in the tree and held by nobody."""
    return {worker.worker_id: [group.num_evictable for group in worker.groups] for worker in stats.workers}


class Services(NamedTuple):
    client: Client
    cache: ServiceProcess
    workers: list[ServiceProcess]

    async def ask(self, prompts: list[list[int]], salt: str = "") -> list[Answer]:
        """One after the other, to each worker in turn."""
        answers = []
        for at, prompt in enumerate(prompts):
            worker = self.workers[at % len(self.workers)]
            answers.append(await self.client.generate(worker.address, prompt, ANSWER, salt=salt))
        return answers

    async def kill(self) -> dict[str, list[int]]:
        """Returns what was cached before."""
        stats = await self.client.idle(self.cache.address)
        self.cache.kill()
        self.cache.settings.update(listen=self.cache.address, admin_listen=self.cache.announced["admin"])
        return cached_pages(stats)

    async def restart(self, known: dict[str, list[int]]) -> cache_pb2.StatsResponse:
        """Returns the stats once every worker is back with at least these pages."""
        epoch = self.cache.announced["epoch"]
        await asyncio.to_thread(self.cache.start)
        assert self.cache.announced["epoch"] != epoch

        def is_back(stats: cache_pb2.StatsResponse) -> bool:
            pages = cached_pages(stats)
            whole = [pages.get(name, [0])[0] >= counts[0] for name, counts in known.items()]
            return all(whole) and nothing_is_held(stats)

        return await self.client.until(self.cache.address, is_back)

    async def clear(self, salt: str) -> cache_pb2.ClearResponse:
        model = (await self.client.stats(self.cache.address)).workers[0].model
        request = cache_pb2.ClearRequest(namespace=types_pb2.Namespace(model=model, salt=salt))
        return await self.client.cache_admin(self.cache.announced["admin"]).Clear(request)


def services(client: Client, start: Starter, count: int = 1, **settings: object) -> Services:
    cache = start.cache(**settings)
    return Services(client, cache, start.workers(cache.address, count))


def prompts_of(draw: Draw) -> list[list[int]]:
    trunk = draw(200)
    return [trunk + draw(90), trunk + draw(150), draw(330), trunk[:130] + draw(60), draw(70)]


def counts(answers: list[Answer]) -> list[tuple[int, int, int]]:
    return [answer.counts for answer in answers]


@pytest.mark.parametrize("kind", ["llama", "gpt-oss", "lfm2"])
async def test_prompts_hit_as_before_the_kill_and_answer_as_cold_runs(
    client: Client, start: Starter, draw: Draw, model: Path, tmp_path: Path, kind: str
) -> None:
    folder = model
    if kind != "llama":
        folder = tmp_path / kind
        make = make_states if kind == "lfm2" else lambda into, tokenizer: make_kind(kind, into, tokenizer)
        await asyncio.to_thread(make, folder, model / "tokenizer.json")
    cache = start.cache()
    served = Services(client, cache, start.workers(cache.address, model=folder))
    prompts = prompts_of(draw)
    await served.ask(prompts)
    before = await served.ask(prompts)
    assert min(answer.usage.cached_tokens for answer in before) > 0
    known = await served.kill()
    stats = await served.restart(known)
    again = await served.ask(prompts)
    assert counts(again) == counts(before)
    (worker,) = stats.workers
    assert worker.restored_pages == known["worker-1"][0]
    share = sum(answer.usage.cached_tokens for answer in again) / sum(answer.usage.cached_tokens for answer in before)
    pages = [after / were for after, were in zip(cached_pages(stats)["worker-1"], known["worker-1"], strict=True)]
    print(f"{kind}: cached after the kill {share:.2%} of the tokens, {pages[0]:.2%} of the pages of the first group")
    assert share >= 0.99
    for prompt, answer in zip(prompts, again, strict=True):
        cold = await client.cold(served.workers[0].address, prompt, ANSWER)
        assert (answer.tokens, answer.text) == (cold.tokens, cold.text)
    await client.until(cache.address, healthy)


async def test_a_salt_that_was_cleared_stays_cold_after_the_kill(client: Client, start: Starter, draw: Draw) -> None:
    served = services(client, start)
    prompts = prompts_of(draw)
    before = await served.ask(prompts)
    await served.ask(prompts, TENANT)
    before = await served.ask(prompts)
    cleared = await served.clear(TENANT)
    assert cleared.num_pages > 0
    assert cleared.num_unconfirmed_workers == 0
    await served.restart(await served.kill())
    assert [answer.usage.cached_tokens for answer in await served.ask(prompts[2:3], TENANT)] == [0]
    assert counts(await served.ask(prompts)) == counts(before)


async def test_two_workers_come_back_each_with_its_own_pages(client: Client, start: Starter, draw: Draw) -> None:
    served = services(client, start, 2)
    prompts = prompts_of(draw)[:4]
    await served.ask(prompts)
    before = await served.ask(prompts)
    known = await served.kill()
    assert len(known) == 2
    await served.restart(known)
    again = await served.ask(prompts)
    assert counts(again) == counts(before)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in before]


async def test_a_kill_during_the_inventory_loses_nothing(client: Client, start: Starter, draw: Draw) -> None:
    """Slices of three pages; the service is killed when some are in, and again."""
    served = services(client, start, max_adopt_pages=3)
    prompts = prompts_of(draw)
    await served.ask(prompts)
    before = await served.ask(prompts)
    known = await served.kill()
    for _ in range(2):
        await asyncio.to_thread(served.cache.start)
        await client.until(served.cache.address, lambda stats: any(w.restored_pages for w in stats.workers))
        served.cache.kill()
    await served.restart(known)
    again = await served.ask(prompts)
    assert counts(again) == counts(before)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in before]


async def test_the_rest_of_the_cache_comes_back_beside_requests_that_run(
    client: Client, start: Starter, draw: Draw
) -> None:
    served = services(client, start)
    prompts = prompts_of(draw)
    await served.ask(prompts)
    before = await served.ask(prompts)
    running = Running(client, served.workers[0].address, [prompts[0] + draw(40), draw(100)])
    await running.decoding.wait()
    assert running.all_run
    served.cache.kill()
    served.cache.settings["listen"] = served.cache.address
    await asyncio.to_thread(served.cache.start)
    await running.check()
    again = await served.ask(prompts)
    assert counts(again) == counts(before)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in before]
