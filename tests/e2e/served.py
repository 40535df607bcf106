"""Services whose workers spill and fetch everything, and what a model of any kind must do in them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from protos.v1 import cache_pb2
from tests.e2e.client import Answer, Client, nothing_is_held, unused_salt
from tests.e2e.processes import ServiceProcess
from tests.e2e.running import Draw, Running, healthy
from tests.redis_process import RedisProcess

LENGTH = 333
ANSWER = 24
# To have all requests of a test run at once.
ATTEMPTS = 5


@dataclass(frozen=True)
class Served:
    """`here` and `there` spill what they publish, and fetch whatever Redis has; `small` has fewer pages than six
    requests need."""

    page_tokens: int
    redis: RedisProcess
    cache: ServiceProcess
    here: ServiceProcess
    there: ServiceProcess
    small: ServiceProcess

    @property
    def reused(self) -> tuple[int, int]:
        """Of a prompt of LENGTH tokens: how many are in whole pages, and how many are left."""
        whole = LENGTH // self.page_tokens * self.page_tokens
        return whole, LENGTH - whole

    async def all_well(self, client: Client) -> cache_pb2.StatsResponse:
        """Three workers, none of which holds anything."""
        return await client.until(self.cache.address, lambda stats: len(stats.workers) == 3 and healthy(stats))

    async def spilled(self, client: Client, prompt: Sequence[int]) -> Answer:
        """The answer `here`, once all pages of the prompt are in the host tier."""
        rows = (await client.stats(self.cache.address)).host_tier.num_rows + len(prompt) // self.page_tokens
        answer = await client.generate(self.here.address, prompt, ANSWER)
        await client.until(
            self.cache.address, lambda stats: stats.host_tier.num_rows >= rows and nothing_is_held(stats)
        )
        return answer


async def cold(client: Client, worker: ServiceProcess, prompt: Sequence[int], max_tokens: int = ANSWER) -> list[int]:
    return (await client.cold(worker.address, prompt, max_tokens)).varied_tokens


async def check_fetch(client: Client, served: Served, prompt: list[int]) -> None:
    """The other worker brings a prompt's pages, once."""
    whole, rest = served.reused
    first = await served.spilled(client, prompt)
    answers = [await client.generate(served.there.address, prompt, ANSWER) for _ in range(2)]
    assert [answer.counts for answer in answers] == [(0, whole, rest), (whole, 0, rest)]
    assert answers[0].tokens == answers[1].tokens == first.tokens == await cold(client, served.there, prompt)


async def check_preemption(client: Client, served: Served, prompts: list[list[int]], max_tokens: int) -> None:
    """Requests that come to need more pages than `small` has answer as when alone.

    On busy cores the first may have ended before the last begins: then all are sent again, in another namespace.
    """
    small, answers = served.small, []
    for _ in range(ATTEMPTS):
        salt = unused_salt()
        calls = (client.generate(small.address, prompt, max_tokens, salt=salt) for prompt in prompts)
        answers = await asyncio.gather(*calls)
        if any(answer.usage.num_preemptions for answer in answers):
            break
    assert sum(answer.usage.num_preemptions for answer in answers) > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == await cold(client, small, prompt, max_tokens)


async def check_worker_kill(client: Client, served: Served, draw: Draw) -> None:
    """What it had published comes back from the host tier; what it was answering, the other worker answers."""
    here, there, known, prompt = served.here, served.there, draw(LENGTH), draw(200)
    whole, rest = served.reused
    first = await served.spilled(client, known)
    call = client.stream(here.address, prompt, 1500)
    await call.read()
    here.kill()
    with pytest.raises(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    retried = await client.generate(there.address, prompt, ANSWER)
    assert sum(retried.counts) == 200 and retried.usage.cached_tokens == 0
    assert retried.tokens == await cold(client, there, prompt)
    await asyncio.to_thread(here.start)
    back = await client.generate(here.address, known, ANSWER)
    assert back.counts == (0, whole, rest)
    assert back.tokens == first.tokens == await cold(client, here, known)
    stats = await served.all_well(client)
    assert here.announced["incarnation"] in {worker.incarnation for worker in stats.workers}


async def check_cache_kill(
    client: Client, served: Served, draw: Draw, prompts: list[list[int]], max_tokens: int = 120
) -> None:
    """Running sequences go on; what the last of them had computed, before and after, is findable again."""
    cache, here = served.cache, served.here
    running = Running(client, here.address, prompts, max_tokens)
    await running.decoding.wait()
    cache.kill()
    assert running.all_run, "they ended before the cache service did"
    cache.settings["listen"] = cache.address
    epoch = cache.announced["epoch"]
    await asyncio.to_thread(cache.start)
    assert cache.announced["epoch"] != epoch
    await running.check()
    prompt, task = running.prompts[-1], running.tasks[-1]
    turn = prompt + task.result().tokens + draw(20)
    known = (len(prompt) + max_tokens - 1) // served.page_tokens * served.page_tokens
    again = await client.generate(here.address, turn, ANSWER)
    assert again.counts == (known, 0, len(turn) - known)
    assert again.tokens == await cold(client, here, turn)
    await served.all_well(client)
