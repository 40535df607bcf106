"""The engine without its cache service: when it is given up, and that requests end with the right tokens."""

from __future__ import annotations

import asyncio

import pytest

from session.messages import Step, StepReply
from tests.worker_service.engine_harness import EngineHarness, collect, reference, running_engine
from worker_service.observer import Observer
from worker_service.outage import MAX_DOUBLINGS, USUAL_REPLIES, WELL_S, Patience

NUM_TOKENS = 120
PROMPT = [3] * 9


class TakenPages(Observer):
    def __init__(self) -> None:
        self.num_pages = self.num_lost = 0

    def took_pages(self, num_pages: int) -> None:
        self.num_pages += num_pages

    def session_lost(self) -> None:
        self.num_lost += 1


class Silence:
    """From `begin` to `end` no step gets a reply and no Hello a Welcome."""

    def __init__(self, harness: EngineHarness) -> None:
        self._cache = harness.cache
        self._step = harness.cache.step
        self._speaks = asyncio.Event()
        self._speaks.set()
        harness.cache.step = self._answer  # type: ignore[method-assign]

    async def _answer(self, step: Step) -> StepReply:
        await self._speaks.wait()
        return await self._step(step)

    def begin(self) -> None:
        self._speaks.clear()
        self._cache.is_up.clear()

    def end(self) -> None:
        self._speaks.set()
        self._cache.is_up.set()


async def fill_the_pool(harness: EngineHarness) -> None:
    for first in range(10, 16):
        await collect(harness.ask([first] * 40, 2))


@pytest.mark.parametrize("restarted", [False, True])
async def test_streams_end_in_a_full_pool_without_the_cache_service(restarted: bool) -> None:
    seen = TakenPages()
    async with running_engine(observer=seen, detach_after_s=0.02) as harness:
        silence = Silence(harness)
        await fill_the_pool(harness)
        streams = [harness.ask([*PROMPT, last], NUM_TOKENS) for last in (1, 2)]
        first = [await stream.next_piece() for stream in streams]
        silence.begin()
        rest = [await collect(stream) for stream in streams]
        for last, piece, more in zip((1, 2), first, rest, strict=True):
            assert piece.token_ids + more.token_ids == reference([*PROMPT, last], NUM_TOKENS)
            assert more.usage is not None and more.usage.num_preemptions == 0
        assert seen.num_pages > 0
        assert harness.engine.scheduler.is_detached
        if restarted:
            harness.cache.restart()
        silence.end()
        await harness.settled()
        again = await collect(harness.ask([*PROMPT, 1, *reference([*PROMPT, 1], 40)], 4))
        assert again.usage is not None and again.usage.cached_tokens == 48
        assert again.token_ids == reference([*PROMPT, 1], 44)[40:]


async def test_with_zero_streams_wait_for_the_cache_service() -> None:
    async with running_engine(detach_after_s=0.0) as harness:
        silence = Silence(harness)
        stream = harness.ask(PROMPT, NUM_TOKENS)
        seen = (await stream.next_piece()).token_ids
        silence.begin()
        await asyncio.sleep(0.1)
        assert harness.engine.scheduler.num_unfinished == 1 and not harness.engine.scheduler.is_detached
        silence.end()
        assert seen + (await collect(stream)).token_ids == reference(PROMPT, NUM_TOKENS)


async def test_a_silent_service_is_kept_while_streams_have_pages() -> None:
    seen = TakenPages()
    async with running_engine(observer=seen, detach_after_s=0.01, decode_ahead_tokens=NUM_TOKENS) as harness:
        silence = Silence(harness)
        stream = harness.ask(PROMPT, NUM_TOKENS)
        before = (await stream.next_piece()).token_ids
        await asyncio.sleep(0.02)
        silence.begin()
        piece = await collect(stream)
        assert before + piece.token_ids == reference(PROMPT, NUM_TOKENS)
        assert seen.num_pages == seen.num_lost == 0
        silence.end()
        await harness.settled()


async def test_a_request_that_comes_during_an_outage_is_served_after_it() -> None:
    async with running_engine(detach_after_s=0.01) as harness:
        silence = Silence(harness)
        stream = harness.ask(PROMPT, NUM_TOKENS)
        await stream.next_piece()
        silence.begin()
        late = asyncio.create_task(collect(harness.ask([9] * 7, 5)))
        await collect(stream)
        await asyncio.sleep(0.02)
        assert not late.done()
        silence.end()
        assert (await late).token_ids == reference([9] * 7, 5)
        await harness.settled()


async def test_a_worker_stops_during_an_outage() -> None:
    async with running_engine(detach_after_s=0.01) as harness:
        silence = Silence(harness)
        stream = harness.ask(PROMPT, 20)
        await stream.next_piece()
        silence.begin()
        await collect(stream)
        harness.engine.stop()
        async with asyncio.timeout(10):
            await harness.task


def test_patience_follows_usual_replies_and_doubles_after_each_loss() -> None:
    patience = Patience(0.05)
    assert patience.seconds() == 0.05
    patience.lost()
    patience.lost()
    assert patience.seconds() == pytest.approx(0.2)
    for _ in range(20):
        patience.lost()
    assert patience.seconds() == pytest.approx(0.05 * 2**MAX_DOUBLINGS)
    patience.replied(0.0, 1000.0)
    patience.replied(0.0, 1000.0 + WELL_S)
    assert patience.seconds() == 0.05
    for _ in range(200):
        patience.replied(0.1, 1000.0 + WELL_S)
    assert patience.seconds() == pytest.approx(0.1 * USUAL_REPLIES, rel=0.01)
    assert Patience(0.0).seconds() == float("inf")


def test_only_replies_make_the_service_well_again() -> None:
    """A service that comes back after a long outage replies slowly at first: all workers have it adopt their pages."""
    patience = Patience(0.05)
    patience.replied(0.0, 1000.0 - WELL_S)
    patience.replied(0.0, 1000.0)
    patience.lost()
    assert patience.seconds() == pytest.approx(0.1)
    # Silence of two minutes, one reply, and it is given up once more.
    patience.replied(0.0, 1000.0 + 2 * WELL_S)
    assert patience.seconds() == pytest.approx(0.1)
    patience.lost()
    assert patience.seconds() == pytest.approx(0.2)
    patience.replied(0.0, 2000.0)
    patience.replied(0.0, 2000.0 + WELL_S - 1)
    assert patience.seconds() == pytest.approx(0.2)
    patience.replied(0.0, 2000.0 + WELL_S)
    assert patience.seconds() == patience.seconds() == 0.05
    patience.lost()
    assert patience.seconds() == pytest.approx(0.1), "doubling did not start over"
