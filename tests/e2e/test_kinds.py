"""Every kind of layers through both services: prefixes are reused by every way, with exact counts and equal texts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.client import Client
from tests.e2e.conftest import Starter
from tests.e2e.kinds import KINDS, make_kind
from tests.e2e.running import Draw, lengths
from tests.e2e.served import (
    ANSWER,
    LENGTH,
    Served,
    check_cache_kill,
    check_fetch,
    check_preemption,
    check_worker_kill,
    cold,
)
from tests.e2e.test_reuse import check_mid_flight
from tests.redis_process import RedisProcess

# Of the worker with few pages.
LARGE_PAGE, MOST_TOKENS = 64, 800


@dataclass(frozen=True)
class ServedKind(Served):
    """`small` has pages of 64 tokens, or larger ones where the kind has."""

    kind: str


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(f"kind-{name}")) for name in KINDS]
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path, redis_binary: str
) -> Iterator[ServedKind]:
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    make_kind(name, folder, model / "tokenizer.json")
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(redis_binary))
        start = Starter(tmp_path_factory.mktemp(f"{name}-services"), folder, stack)
        cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always", grace_ms=20_000)
        tier = {"host_tier": "redis", "redis_url": redis.url}
        # With pages for the rest of their answers, requests would end while the cache service is away.
        waiting = {"max_decode_ahead_tokens": 0, "detach_after_ms": 0}
        here, there = start.workers(cache.address, 2, token_budget=128, **waiting, **tier)
        page, large = KINDS[name].page, max(KINDS[name].page, LARGE_PAGE)
        # Pages for one sequence of the greatest length. On a busy machine a reply may take as long as an outage.
        tight = {"page_tokens": large, "pool_pages": -(-MOST_TOKENS // large), "max_model_len": MOST_TOKENS}
        tight["detach_after_ms"] = 0
        (small,) = start.workers(cache.address, 1, 3, token_budget=64, max_num_seqs=8, **tight)
        yield ServedKind(page, redis, cache, here, there, small, name)


async def test_hits_on_one_device(client: Client, served: ServedKind, draw: Draw) -> None:
    """Repeated, branched off in the middle, and gone on from in a second turn."""
    here, page, prompt = served.here, served.page_tokens, draw(LENGTH)
    whole, rest = served.reused
    stats = await served.all_well(client)
    assert [tuple(group.name for group in worker.groups) for worker in stats.workers] == [KINDS[served.kind].groups] * 3
    before = await client.worker_stats(served.cache.address, "worker-1")

    first = await client.generate(here.address, prompt, ANSWER)
    again = await client.generate(here.address, prompt, ANSWER)
    assert [first.counts, again.counts] == [(0, 0, LENGTH), (whole, 0, rest)]
    shared = {length: length // page * page for length in (330, 200, 100)}
    branches = [prompt[:length] + draw(30) for length in shared]
    hot = await asyncio.gather(*(client.generate(here.address, branch, ANSWER) for branch in branches))
    assert [answer.counts for answer in hot] == [(hit, 0, length + 30 - hit) for length, hit in shared.items()]
    turn = prompt + first.tokens + draw(20)
    second = await client.generate(here.address, turn, ANSWER)
    # The last token that was sampled never went through the model, so it has no KV.
    known = (LENGTH + ANSWER - 1) // page * page
    assert second.counts == (known, 0, len(turn) - known)

    after = await client.worker_stats(served.cache.address, "worker-1")
    counted = [getattr(after, name) - getattr(before, name) for name in ("cached_tokens", "computed_tokens")]
    answers = (first, again, *hot, second)
    assert counted == [sum(a.usage.cached_tokens for a in answers), sum(a.usage.computed_tokens for a in answers)]
    assert first.tokens == again.tokens == await cold(client, here, prompt)
    for branch, answer in zip((*branches, turn), (*hot, second), strict=True):
        assert answer.tokens == await cold(client, here, branch)
    await served.all_well(client)


async def test_a_sibling_hits_while_the_first_still_decodes(client: Client, served: ServedKind, draw: Draw) -> None:
    """Cases 20 and 24, with pages of 16 (336 cached, 2 computed) and of 64 (320 and 18), or of 128 (256 and 82)."""
    for worker, page in ((served.here, served.page_tokens), (served.small, max(served.page_tokens, LARGE_PAGE))):
        hit = 337 // page * page
        await check_mid_flight(client, worker.address, draw(338), (hit, 0, 338 - hit))


async def test_siblings_compute_one_large_page_once(client: Client, served: ServedKind, draw: Draw) -> None:
    """Four at once, of a page of 64 tokens (or 128) and five of their own: they compute 84 (or 148) in all."""
    page = max(served.page_tokens, LARGE_PAGE)
    shared = draw(page)
    prompts = [shared + draw(5) for _ in range(4)]
    answers = await asyncio.gather(*(client.generate(served.small.address, prompt, 8) for prompt in prompts))
    assert sorted(answer.counts for answer in answers) == [(0, 0, page + 5), *[(page, 0, 5)] * 3]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == await cold(client, served.small, prompt, 8)
    await served.all_well(client)


async def test_the_other_worker_fetches(client: Client, served: ServedKind, draw: Draw) -> None:
    prompt = draw(LENGTH)
    await check_fetch(client, served, prompt)
    branch = prompt[:200] + draw(30)
    elsewhere = await client.generate(served.there.address, branch, ANSWER)
    # Without the host tier no window before that boundary would be there, and nothing could be skipped.
    has_window, known = len(KINDS[served.kind].groups) > 1, 200 // served.page_tokens * served.page_tokens
    assert elsewhere.counts == ((0, known, 230 - known) if has_window else (known, 0, 230 - known))
    assert elsewhere.tokens == await cold(client, served.there, branch)
    await served.all_well(client)


async def test_preempted_requests_answer_as_when_alone(client: Client, served: ServedKind, draw: Draw) -> None:
    # Five sequences have 2 pages of 64, or 1 of 128, and all need one more at 128 tokens; there are 13, or 7.
    await check_preemption(client, served, [draw(110 + 3 * at) for at in range(5)], ANSWER)
    stats = await served.all_well(client)
    assert {worker.worker_id: worker.num_refusals > 0 for worker in stats.workers}["worker-3"]


async def test_a_worker_is_killed_and_started_again(client: Client, served: ServedKind, draw: Draw) -> None:
    await check_worker_kill(client, served, draw)


async def test_the_cache_service_is_killed_and_started_again(client: Client, served: ServedKind, draw: Draw) -> None:
    await check_cache_kill(client, served, draw, lengths(draw))
