"""Every kind of layers through both services: prefixes are reused by every way, with exact counts and equal texts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio
import pytest

from protos.v1 import cache_pb2
from tests.e2e.client import Answer, Client, nothing_is_held, unused_salt
from tests.e2e.conftest import Starter
from tests.e2e.kinds import KINDS, PAGE, make_kind
from tests.e2e.processes import ServiceProcess
from tests.e2e.running import Draw, Running, healthy, lengths
from tests.e2e.test_reuse import check_mid_flight
from tests.redis_process import RedisProcess

LENGTH = 333
WHOLE = LENGTH // PAGE * PAGE
ANSWER = 40


class Served(NamedTuple):
    """A kind's services. `here` and `there` spill what they publish, and fetch whatever Redis has; `small` has pages of
    64 tokens, and fewer of them than six requests need."""

    kind: str
    cache: ServiceProcess
    here: ServiceProcess
    there: ServiceProcess
    small: ServiceProcess

    async def all_well(self, client: Client) -> cache_pb2.StatsResponse:
        """Three workers, none of which holds anything."""
        return await client.until(self.cache.address, lambda stats: len(stats.workers) == 3 and healthy(stats))

    async def spilled(self, client: Client, prompt: Sequence[int]) -> Answer:
        """The answer `here`, once all pages of the prompt are in the host tier."""
        rows = (await client.stats(self.cache.address)).host_tier.num_rows + len(prompt) // PAGE
        answer = await client.generate(self.here.address, prompt, ANSWER)
        await client.until(
            self.cache.address, lambda stats: stats.host_tier.num_rows >= rows and nothing_is_held(stats)
        )
        return answer


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(f"kind-{name}")) for name in KINDS]
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path, redis_binary: str
) -> Iterator[Served]:
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    make_kind(name, folder, model / "tokenizer.json")
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(redis_binary))
        start = Starter(tmp_path_factory.mktemp(f"{name}-services"), folder, stack)
        cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always", grace_ms=20_000)
        tier = {"host_tier": "redis", "redis_url": redis.url}
        # With pages for the rest of their answers, requests would end while the cache service is away.
        here, there = start.workers(cache.address, 2, token_budget=128, max_decode_ahead_tokens=0, **tier)
        tight = {"page_tokens": 64, "pool_pages": 13, "max_model_len": 800, "max_num_seqs": 8}
        (small,) = start.workers(cache.address, 1, 3, token_budget=64, **tight)
        yield Served(name, cache, here, there, small)


async def cold(client: Client, worker: ServiceProcess, prompt: Sequence[int], max_tokens: int = ANSWER) -> list[int]:
    answer = await client.generate(worker.address, prompt, max_tokens, salt=unused_salt())
    assert answer.counts == (0, 0, len(prompt)), "the cold run was not cold"
    assert len(set(answer.tokens)) > 5, "an answer of a few tokens in turn shows nothing"
    return answer.tokens


async def test_hits_on_one_device(client: Client, served: Served, draw: Draw) -> None:
    """Repeated, branched off in the middle, and gone on from in a second turn."""
    here, prompt = served.here, draw(LENGTH)
    stats = await served.all_well(client)
    assert [tuple(group.name for group in worker.groups) for worker in stats.workers] == [KINDS[served.kind].groups] * 3
    before = await client.worker_stats(served.cache.address, "worker-1")

    first = await client.generate(here.address, prompt, ANSWER)
    again = await client.generate(here.address, prompt, ANSWER)
    assert [first.counts, again.counts] == [(0, 0, LENGTH), (WHOLE, 0, LENGTH - WHOLE)]
    branches = [prompt[:length] + draw(30) for length in (330, 200, 100)]
    hot = await asyncio.gather(*(client.generate(here.address, branch, ANSWER) for branch in branches))
    assert [answer.counts for answer in hot] == [(320, 0, 40), (192, 0, 38), (96, 0, 34)]
    turn = prompt + first.tokens + draw(20)
    second = await client.generate(here.address, turn, ANSWER)
    # The last token that was sampled never went through the model, so it has no KV.
    known = (LENGTH + ANSWER - 1) // PAGE * PAGE
    assert second.counts == (known, 0, len(turn) - known)

    after = await client.worker_stats(served.cache.address, "worker-1")
    counted = [getattr(after, name) - getattr(before, name) for name in ("cached_tokens", "computed_tokens")]
    answers = (first, again, *hot, second)
    assert counted == [sum(a.usage.cached_tokens for a in answers), sum(a.usage.computed_tokens for a in answers)]
    assert first.tokens == again.tokens == await cold(client, here, prompt)
    for branch, answer in zip((*branches, turn), (*hot, second), strict=True):
        assert answer.tokens == await cold(client, here, branch)
    await served.all_well(client)


async def test_a_sibling_hits_while_the_first_still_decodes(client: Client, served: Served, draw: Draw) -> None:
    """Cases 20 and 24, with pages of 16 and of 64."""
    await check_mid_flight(client, served.here.address, draw(338), (336, 0, 2))
    await check_mid_flight(client, served.small.address, draw(338), (320, 0, 18))


async def test_the_other_worker_fetches(client: Client, served: Served, draw: Draw) -> None:
    prompt = draw(LENGTH)
    first = await served.spilled(client, prompt)
    answers = [await client.generate(served.there.address, prompt, ANSWER) for _ in range(2)]
    assert [a.counts for a in answers] == [(0, WHOLE, LENGTH - WHOLE), (WHOLE, 0, LENGTH - WHOLE)]
    assert answers[0].tokens == answers[1].tokens == first.tokens == await cold(client, served.there, prompt)
    branch = prompt[:200] + draw(30)
    elsewhere = await client.generate(served.there.address, branch, ANSWER)
    # Without the host tier no window before that boundary would be there, and nothing could be skipped.
    has_window = len(KINDS[served.kind].groups) > 1
    assert elsewhere.counts == ((0, 192, 38) if has_window else (192, 0, 38))
    assert elsewhere.tokens == await cold(client, served.there, branch)
    await served.all_well(client)


async def test_preempted_requests_answer_as_when_alone(client: Client, served: Served, draw: Draw) -> None:
    small, prompts = served.small, [draw(40 + 9 * at) for at in range(6)]
    answers = await asyncio.gather(*(client.generate(small.address, prompt, 120) for prompt in prompts))
    assert sum(answer.usage.num_preemptions for answer in answers) > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == await cold(client, small, prompt, 120)
    stats = await served.all_well(client)
    assert {worker.worker_id: worker.num_refusals > 0 for worker in stats.workers}["worker-3"]


async def test_a_worker_is_killed_and_started_again(client: Client, served: Served, draw: Draw) -> None:
    """What it had published comes back from the host tier; what it was answering, the other worker answers."""
    here, there, known, prompt = served.here, served.there, draw(LENGTH), draw(200)
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
    assert back.counts == (0, WHOLE, LENGTH - WHOLE)
    assert back.tokens == first.tokens == await cold(client, here, known)
    stats = await served.all_well(client)
    assert here.announced["incarnation"] in {worker.incarnation for worker in stats.workers}


async def test_the_cache_service_is_killed_and_started_again(client: Client, served: Served, draw: Draw) -> None:
    cache, here = served.cache, served.here
    running = Running(client, here.address, lengths(draw))
    await running.decoding.wait()
    cache.kill()
    assert running.all_run, "they ended before the cache service did"
    cache.settings["listen"] = cache.address
    epoch = cache.announced["epoch"]
    await asyncio.to_thread(cache.start)
    assert cache.announced["epoch"] != epoch
    await running.check()
    # What the adopted requests had computed, before and after, is findable again: a second turn goes on from it.
    prompt, task = running.prompts[3], running.tasks[3]
    turn = prompt + task.result().tokens + draw(20)
    known = (len(prompt) + running.max_tokens - 1) // PAGE * PAGE
    again = await client.generate(here.address, turn, ANSWER)
    assert again.counts == (known, 0, len(turn) - known)
    assert again.tokens == await cold(client, here, turn)
    await served.all_well(client)
