"""Prefixes reused on one device, through both services: what is counted, and that no answer changes.

Every warm answer is compared with a cold run of the same prompt in a namespace that nobody used.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

import pytest

from protos.v1 import types_pb2
from tests.e2e.client import Client
from tests.e2e.conftest import Cluster, Starter

Draw = Callable[[int], list[int]]


async def test_a_long_prompt_three_times(client: Client, cluster: Cluster, draw: Draw) -> None:
    """Case 18: 7,820 tokens, pages of 16."""
    prompt, worker = draw(7820), cluster.workers[0]
    before = await client.worker_stats(cluster.cache, "worker-1")
    answers = [await client.generate(worker, prompt) for _ in range(3)]
    after = await client.worker_stats(cluster.cache, "worker-1")
    assert [answer.counts for answer in answers] == [(0, 0, 7820), (7808, 0, 12), (7808, 0, 12)]
    told = [(a.usage.matched_tokens, a.usage.usable_tokens, a.usage.miss_reason) for a in answers[:2]]
    assert told == [(0, 0, types_pb2.MISS_REASON_NEVER_SEEN), (7808, 7808, types_pb2.MISS_REASON_PAGE_TAIL)]
    assert answers[1].tokens == answers[0].tokens
    assert answers[2].tokens == answers[0].tokens
    assert after.prompt_tokens - before.prompt_tokens == 3 * 7820
    assert after.cached_tokens - before.cached_tokens == 2 * 7808
    assert after.num_requests - before.num_requests == 3


async def test_a_sibling_hits_while_the_first_still_decodes(client: Client, cluster: Cluster, draw: Draw) -> None:
    """Case 24 at a page of 16: 336 tokens cached, 2 computed."""
    await check_mid_flight(client, cluster.workers[0], draw(338), (336, 0, 2))


async def test_a_sibling_hits_while_the_first_still_decodes_with_large_pages(
    client: Client, start: Starter, draw: Draw
) -> None:
    """Case 24 at a page of 64: 320 tokens cached, 18 computed."""
    cache = start.cache()
    worker = start.workers(cache.address, page_tokens=64)[0]
    await check_mid_flight(client, worker.address, draw(338), (320, 0, 18))


async def check_mid_flight(client: Client, worker: str, prompt: list[int], counts: tuple[int, int, int]) -> None:
    """The first token comes at once; later ones may be merged into a message that comes much later.

    The first asks for 600 tokens, to outlast the second, and is cancelled after the eight that are compared.
    """
    tokens, first_decodes, enough = array("i"), asyncio.Event(), asyncio.Event()

    async def read() -> None:
        async for response in client.stream(worker, prompt, 600):
            tokens.frombytes(response.token_ids)
            first_decodes.set()
            if len(tokens) >= 8:
                enough.set()

    first = asyncio.create_task(read())
    await first_decodes.wait()
    second = await client.generate(worker, prompt, 8)
    assert not first.done(), "the first ended before the second was answered, so nothing was shown"
    assert second.counts == counts
    await enough.wait()
    first.cancel()
    await asyncio.wait([first])
    assert tokens[:8].tolist() == second.tokens
    assert second.tokens == (await client.cold(worker, prompt)).tokens


async def test_a_shared_prompt_of_many_lines(client: Client, start: Starter, draw: Draw) -> None:
    """Case 55: the third request reports cached tokens; none does when caching is off."""
    lines = draw(330 * 12)
    cache = start.cache()
    on, off = start.workers(cache.address, 1)[0], start.workers(cache.address, 1, 2, prefix_caching="false")[0]
    for worker, expected in ((on.address, 330 * 12 // 16 * 16), (off.address, 0)):
        answers = [await client.generate(worker, lines + draw(5 + turn), 4) for turn in range(3)]
        assert answers[2].usage.cached_tokens == expected
        assert sum(answers[2].counts) == answers[2].usage.prompt_tokens
    cached = {stats.worker_id: stats.cached_tokens for stats in (await client.stats(cache.address)).workers}
    assert cached == {"worker-1": 2 * (330 * 12 // 16 * 16), "worker-2": 0}


async def test_eight_equal_prompts_cost_one_prefill(client: Client, cluster: Cluster, draw: Draw) -> None:
    prompt, worker = draw(2500), cluster.workers[0]
    answers = await asyncio.gather(*(client.generate(worker, prompt) for _ in range(8)))
    computed = sorted(answer.usage.computed_tokens for answer in answers)
    assert computed == [4] * 7 + [2500]
    assert all(answer.tokens == answers[0].tokens for answer in answers)
    assert answers[0].tokens == (await client.cold(worker, prompt)).tokens


async def test_a_conversation_hits_what_was_generated_in_earlier_turns(
    client: Client, cluster: Cluster, draw: Draw
) -> None:
    worker, history = cluster.workers[0], draw(100)
    known = 0
    for turn in range(4):
        answer = await client.generate(worker, history, 20)
        # The last token that was sampled never went through the model, so it has no KV.
        assert answer.counts == (known, 0, len(history) - known), f"turn {turn}"
        assert answer.tokens == (await client.cold(worker, history, 20)).tokens
        known = (len(history) + 20 - 1) // 16 * 16
        history = history + answer.tokens + draw(30)


async def test_requests_of_all_lengths_at_once_answer_as_when_alone(
    client: Client, cluster: Cluster, draw: Draw
) -> None:
    worker, shared = cluster.workers[1], draw(64)
    prompts = [shared[: 16 * (at % 5)] + draw(1 + 23 * at) for at in range(12)]
    together = await asyncio.gather(*(client.generate(worker, prompt, 12) for prompt in prompts))
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.usage.prompt_tokens == len(prompt)
        # On a slow machine one may be preempted, and then computes some tokens twice.
        assert sum(answer.counts) == len(prompt) or answer.usage.num_preemptions
        assert answer.tokens == (await client.cold(worker, prompt, 12)).tokens
    await client.idle(cluster.cache)


@pytest.mark.parametrize("threshold", [0, 48])
async def test_a_tiny_pool_preempts_and_every_answer_is_right(
    client: Client, start: Starter, draw: Draw, threshold: int
) -> None:
    cache = start.cache()
    worker = start.workers(
        cache.address,
        pool_pages=24,
        max_model_len=256,
        token_budget=64,
        max_num_seqs=8,
        long_prefill_token_threshold=threshold,
    )[0]
    prompts = [draw(40 + 9 * at) for at in range(6)]
    answers = await asyncio.gather(*(client.generate(worker.address, prompt, 60) for prompt in prompts))
    alone = [await client.cold(worker.address, prompt, 60) for prompt in prompts]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]
    assert sum(answer.usage.num_preemptions for answer in answers) > 0
    stats = await client.idle(cache.address)
    assert stats.workers[0].num_refusals > 0
