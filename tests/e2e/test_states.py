"""A model with recurrent states through both services: snapshots are resumed from by every way, with exact counts and
the texts of cold runs."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from protos.v1 import types_pb2, worker_pb2
from tests.e2e.client import Client
from tests.e2e.conftest import Starter
from tests.e2e.processes import ServiceProcess
from tests.e2e.running import Draw, healthy
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
from tests.e2e.states import GROUPS, PAGE, make_states
from tests.e2e.test_reuse import check_mid_flight
from tests.redis_process import RedisProcess

WHOLE = LENGTH // PAGE * PAGE
BUDGET = 300
# Keys of pages in Redis.
VALUES = "stemcache:1:*:*"


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.xdist_group(f"states-{name}")) for name in ("lfm2", "qwen3.5")],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path, redis_binary: str
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("states")
    make_states(folder, model / "tokenizer.json", request.param)
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(redis_binary))
        start = Starter(tmp_path_factory.mktemp("services"), folder, stack)
        cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always", grace_ms=20_000)
        here, there = start.workers(cache.address, 2, host_tier="redis", redis_url=redis.url)
        tight = {"pool_pages": 24, "max_model_len": 1400, "max_num_seqs": 8, "state_share": 2, "detach_after_ms": 0}
        (small,) = start.workers(cache.address, 1, 3, token_budget=BUDGET, **tight)
        yield Served(PAGE, redis, cache, here, there, small)


@pytest.mark.parametrize(("length", "cached"), [(64, 0), (65, 64), (128, 64), (192, 128), (800, 768), (1024, 960)])
async def test_a_repeated_prompt_skips_all_whole_pages_but_the_last(
    client: Client, served: Served, draw: Draw, length: int, cached: int
) -> None:
    """Also where a launch computes less than the prompt: the snapshot is where the last whole page ends."""
    prompt = draw(length)
    for worker in (served.here, served.small):
        answers = [await client.generate(worker.address, prompt, ANSWER, salt=worker.address) for _ in range(2)]
        assert [answer.counts for answer in answers] == [(0, 0, length), (cached, 0, length - cached)]
        assert answers[0].tokens == answers[1].tokens == await cold(client, worker, prompt)
    await served.all_well(client)


async def test_branches_and_a_second_turn(client: Client, served: Served, draw: Draw) -> None:
    here, prompt = served.here, draw(LENGTH)
    stats = await served.all_well(client)
    assert [tuple(group.name for group in worker.groups) for worker in stats.workers] == [GROUPS] * 3
    first = await client.generate(here.address, prompt, ANSWER + 60)
    late = [prompt[:330] + draw(30), prompt[:322] + draw(9)]
    hot = [await client.generate(here.address, branch, ANSWER) for branch in late]
    assert [answer.counts for answer in hot] == [(320, 0, 40), (320, 0, 11)]
    # Where the first branch leaves the prompt there was no snapshot yet: it computes all, and leaves one.
    early = [prompt[:200] + draw(30), prompt[:200] + draw(50)]
    hot += [await client.generate(here.address, branch, ANSWER) for branch in early]
    assert [answer.counts for answer in hot[2:]] == [(0, 0, 230), (192, 0, 58)]
    missed = hot[2].usage
    assert (missed.matched_tokens, missed.usable_tokens, missed.limiting_group) == (192, 0, "state")
    assert missed.miss_reason == types_pb2.MISS_REASON_NO_SNAPSHOT
    for branch, answer in zip((*late, *early), hot, strict=True):
        assert answer.tokens == await cold(client, here, branch)
    # The answer crossed a page's end as it was decoded: its rolling snapshot is the next turn's.
    turn = prompt + first.tokens + draw(20)
    second = await client.generate(here.address, turn, ANSWER)
    assert second.counts == (384, 0, len(turn) - 384)
    assert second.tokens == await cold(client, here, turn)
    await served.all_well(client)


async def test_a_prompt_that_is_left_in_its_middle(client: Client, served: Served, draw: Draw) -> None:
    """It left a snapshot every 512 tokens, by default: the first prompt that leaves it at 600 resumes at 512.

    Chunks leave one where they end, too, and a late reply moves their ends: at 576, for one.
    """
    prompt = draw(1100)
    branch = prompt[:600] + draw(30)
    for worker, most in ((served.here, 512), (served.small, 576)):
        await client.generate(worker.address, prompt, 8)
        hot = await client.generate(worker.address, branch, ANSWER)
        usage, cached = hot.usage, hot.usage.cached_tokens
        assert 512 <= cached <= most and hot.counts == (cached, 0, len(branch) - cached)
        assert hot.tokens == await cold(client, worker, branch)
        assert (usage.matched_tokens, usage.usable_tokens) == (576, cached)
        assert usage.limiting_group == ("state" if cached < 576 else usage.limiting_group)
    stats = await served.all_well(client)
    assert sum(worker.groups[1].num_snapshots_restored for worker in stats.workers) >= 2
    assert sum(worker.groups[1].limited_tokens for worker in stats.workers) >= 64


@pytest.mark.parametrize(("shared", "own"), [(448, 24), (PAGE, 5)])
async def test_siblings_compute_their_shared_start_once(
    client: Client, served: Served, draw: Draw, shared: int, own: int
) -> None:
    """Six at once share a start, which may be a single page: five wait for the first, and resume where they part."""
    start = draw(shared)
    prompts = [start + draw(own) for _ in range(6)]
    for worker in (served.here, served.small):
        answers = await asyncio.gather(*(client.generate(worker.address, prompt, 8) for prompt in prompts))
        assert sorted(answer.counts for answer in answers) == [(0, 0, shared + own), *[(shared, 0, own)] * 5]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == await cold(client, worker, prompt, 8)
    await served.all_well(client)


async def test_a_sibling_hits_while_the_first_still_decodes(client: Client, served: Served, draw: Draw) -> None:
    """Cases 20 and 24."""
    await check_mid_flight(client, served.here.address, draw(338), (320, 0, 18))
    await check_mid_flight(client, served.small.address, draw(338), (320, 0, 18))


async def test_the_other_worker_fetches(client: Client, served: Served, draw: Draw) -> None:
    await check_fetch(client, served, draw(LENGTH))
    await served.all_well(client)


async def test_preempted_requests_answer_as_when_alone(client: Client, served: Served, draw: Draw) -> None:
    # Eight sequences have 3 pages each, and need one more at 192 tokens; there are 24.
    await check_preemption(client, served, [draw(170 + 2 * at) for at in range(8)], 40)
    await served.all_well(client)


async def test_a_worker_is_killed_and_started_again(client: Client, served: Served, draw: Draw) -> None:
    await check_worker_kill(client, served, draw)


async def test_the_cache_service_is_killed_and_started_again(client: Client, served: Served, draw: Draw) -> None:
    """Running sequences keep their states; one that ends leaves its rolling snapshot in the new cache service."""
    await check_cache_kill(client, served, draw, [draw(20), draw(170), draw(300)])


async def test_a_damaged_snapshot_in_the_host_tier_is_never_a_wrong_state(
    client: Client, served: Served, draw: Draw
) -> None:
    """Its pages arrive, its state does not: the request computes all of it, and leaves a sound one."""
    prompt = draw(LENGTH)
    with served.redis.client() as redis:
        old = set(redis.scan_iter(VALUES))
        first = await served.spilled(client, prompt)
        sizes = {key: redis.strlen(key) for key in set(redis.scan_iter(VALUES)) - old}
        # Keys of one prompt: pages of keys and values, all of one size, and its snapshots, which are much smaller.
        states = [key for key, size in sizes.items() if size == min(sizes.values())]
        assert len(sizes) - len(states) == LENGTH // PAGE and states
        for key in states:
            value = redis.get(key)
            assert isinstance(value, bytes)
            redis.set(key, value[:-1] + bytes([value[-1] ^ 1]), keepttl=True)
    corrupt = (await client.stats(served.cache.address)).host_tier.num_corrupt_pages
    answers = [await client.generate(served.there.address, prompt, ANSWER) for _ in range(2)]
    assert (await client.stats(served.cache.address)).host_tier.num_corrupt_pages > corrupt
    assert [answer.counts for answer in answers] == [(0, 0, LENGTH), (WHOLE, 0, LENGTH - WHOLE)]
    assert answers[0].tokens == answers[1].tokens == first.tokens == await cold(client, served.there, prompt)
    await served.all_well(client)


async def test_the_turn_after_a_stop_string_goes_on_from_the_right_state(
    client: Client, served: Served, draw: Draw
) -> None:
    """A stop string ends an answer while the next token's launch is in flight, which writes to the same slots."""
    here, reused = served.here, 0
    for length in range(PAGE - 12, PAGE, 2):
        prompt = draw(length)
        whole = await client.cold(here.address, prompt, ANSWER)
        stop = next((char for char in whole.text[4:] if char.isascii() and char not in whole.text[:4]), "")
        if not stop:
            continue
        answer = await stopped(client, here, prompt, stop)
        assert len(answer) < ANSWER and answer == whole.tokens[: len(answer)]
        turn = prompt + answer + draw(9)
        # The last token that was sampled never went through the model.
        known = (length + len(answer) - 1) // PAGE * PAGE
        again = await client.generate(here.address, turn, ANSWER)
        assert again.counts == (known, 0, len(turn) - known)
        assert again.tokens == await cold(client, here, turn)
        reused += known
    assert reused, "no answer went beyond a page"
    await served.all_well(client)


async def stopped(client: Client, worker: ServiceProcess, prompt: Sequence[int], stop: str) -> list[int]:
    """Returns the tokens of an answer up to the stop string."""
    request = worker_pb2.GenerateRequest(
        token_ids=worker_pb2.TokenIds(ids=array("i", prompt).tobytes()),
        sampling=worker_pb2.SamplingParams(max_tokens=ANSWER, ignore_eos=True, stop=[stop]),
    )
    tokens = array("i")
    async for response in client.worker(worker.address).Generate(request, timeout=60):
        tokens.frombytes(response.token_ids)
    return tokens.tolist()


async def test_a_model_of_states_alone_resumes_from_them(
    client: Client, start: Starter, draw: Draw, model: Path, tmp_path: Path
) -> None:
    """Its one group has no pages, and its memory is slots."""
    folder = tmp_path / "alone"
    make_states(folder, model / "tokenizer.json", layer_types=["conv"] * 4)
    cache = start.cache()
    (worker,) = start.workers(cache.address, 1, model=folder, max_num_seqs=4, pool_mb=1)
    prompt = draw(200)
    first = await client.generate(worker.address, prompt, 8)
    again = await client.generate(worker.address, prompt, 8)
    assert [first.counts, again.counts] == [(0, 0, 200), (192, 0, 8)]
    cold_run = await client.cold(worker.address, prompt, 8)
    assert again.tokens == first.tokens == cold_run.tokens
    stats = await client.until(cache.address, healthy)
    assert [group.name for group in stats.workers[0].groups] == ["state"]
