"""Watchers: the numbering, and what happens to one who falls behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cache_service.core.base.types import Cleared
from cache_service.watchers import MAX_SLICE, PresentState, Watchers, WatcherTooSlow, WatchLimits
from session.errors import TooMany
from session.words import WorkerId


def event(number: int) -> Cleared:
    return Cleared(WorkerId(f"w{number}"))


async def told(watch: AsyncIterator[Any], count: int) -> list[tuple[int, str]]:
    """What the next messages are: their number and, in short, their content."""
    messages = [await anext(watch) for _ in range(count)]
    return [(message.seq, str(message.cleared.worker_id or message.lost.num_events or "")) for message in messages]


async def test_a_watcher_starts_at_the_present() -> None:
    watchers = Watchers("epoch", WatchLimits(2, 8))
    watchers.tell([event(1), event(2)])
    watch = watchers.watch()
    assert await told(watch, 1) == [(2, "")]
    watchers.tell([event(3)])
    watchers.tell([event(4)])
    assert await told(watch, 2) == [(3, "w3"), (4, "w4")]
    await watch.aclose()


async def test_a_lagging_watcher_is_told_how_much_it_lost_and_goes_on() -> None:
    watchers = Watchers("epoch", WatchLimits(2, 3))
    slow, quick = watchers.watch(), watchers.watch()
    await told(slow, 1), await told(quick, 1)
    seen = []
    for number in range(1, 6):
        watchers.tell([event(number)])
        seen += await told(quick, 1)
    assert seen == [(number, f"w{number}") for number in range(1, 6)]
    # Three were queued, the fourth pushed all four out, the fifth is news again.
    assert await told(slow, 2) == [(4, "4"), (5, "w5")]
    for watch in (slow, quick):
        await watch.aclose()


async def test_losses_add_up_while_nobody_reads() -> None:
    watchers = Watchers("epoch", WatchLimits(1, 2))
    watch = watchers.watch()
    await told(watch, 1)
    watchers.tell([event(number) for number in range(1, 8)])
    assert await told(watch, 2) == [(6, "6"), (7, "w7")]
    await watch.aclose()


async def test_events_that_were_never_told_leave_a_gap_for_everybody() -> None:
    watchers = Watchers("epoch", WatchLimits(1, 8))
    watch = watchers.watch()
    await told(watch, 1)
    watchers.tell([event(1)])
    watchers.lose(3)
    watchers.tell([event(5)])
    assert await told(watch, 2) == [(4, "4"), (5, "w5")]
    assert watchers.seq == 5
    await watch.aclose()


async def test_a_queue_is_bounded_in_bytes() -> None:
    watchers = Watchers("epoch", WatchLimits(1, 100, 40))
    watch = watchers.watch()
    await told(watch, 1)
    watchers.tell([event(1), event(2)])
    assert await told(watch, 2) == [(1, "w1"), (2, "w2")]
    watchers.tell([event(number) for number in range(3, 7)])
    assert await told(watch, 2) == [(5, "3"), (6, "w6")]
    await watch.aclose()


def many(num_slices: int, happens: Callable[[int], None] = lambda number: None) -> PresentState:
    """A present state of `num_slices` slices; `happens` is called between them."""
    for number in range(num_slices):
        happens(number)
        yield (Cleared(WorkerId(f"p{number}")),)
    return 7


async def test_what_happens_meanwhile_comes_in_its_place() -> None:
    def happens(number: int) -> None:
        if number == 2:
            watchers.tell([event(9)])

    watchers = Watchers("epoch", WatchLimits(1, 8), present_state=lambda: many(4, happens))
    watchers.tell([event(1)])
    watch = watchers.watch(present_state=True)
    messages = [await anext(watch) for _ in range(7)]
    assert [(m.seq, m.cleared.worker_id) for m in messages[:-1]] == [
        (1, ""), (1, "p0"), (1, "p1"), (2, "w9"), (2, "p2"), (2, "p3"),
    ]  # fmt: skip
    assert (messages[-1].seq, messages[-1].present_state_end.num_pages) == (2, 7)
    watchers.tell([event(3)])
    assert await told(watch, 1) == [(3, "w3")]
    await watch.aclose()


async def test_it_waits_for_a_watcher_that_reads_slowly() -> None:
    """However much is cached, few messages of it wait."""
    made: list[int] = []
    watchers = Watchers("epoch", WatchLimits(1, 4), present_state=lambda: many(1000, made.append))
    watch = watchers.watch(present_state=True)
    for number in range(500):
        assert await told(watch, 1) == [(0, f"p{number - 1}" if number else "")]
        assert len(made) <= number + MAX_SLICE
    await watch.aclose()


async def test_after_a_loss_no_more_of_it_comes() -> None:
    watchers = Watchers("epoch", WatchLimits(1, 2), present_state=lambda: many(1000))
    watch = watchers.watch(present_state=True)
    assert await told(watch, 3) == [(0, ""), (0, "p0"), (0, "p1")]
    watchers.tell([event(number) for number in range(1, 4)])
    assert await told(watch, 1) == [(3, "3")], "events only are counted"
    watchers.tell([event(4)])
    assert await told(watch, 1) == [(4, "w4")]
    await watch.aclose()


async def test_only_so_many_are_told_it_at_once() -> None:
    limits = WatchLimits(4, 8, max_present_states=1)
    watchers = Watchers("epoch", limits, present_state=lambda: many(1000))
    first = watchers.watch(present_state=True)
    await told(first, 2)
    with pytest.raises(TooMany, match="present_state"):
        await anext(watchers.watch(present_state=True))
    plain = watchers.watch()
    await told(plain, 1)
    await first.aclose()
    again = watchers.watch(present_state=True)
    assert await told(again, 2) == [(0, ""), (0, "p0")]
    for watch in (plain, again):
        await watch.aclose()
    assert len(watchers) == 0


async def test_a_watcher_whose_first_message_is_still_being_written_counts() -> None:
    """Its peer may take its time; others that ask meanwhile would all be told at once."""
    limits = WatchLimits(4, 8, max_present_states=1)
    watchers = Watchers("epoch", limits, present_state=lambda: many(3))
    first = watchers.watch(present_state=True)
    await anext(first)
    with pytest.raises(TooMany, match="present_state"):
        await anext(watchers.watch(present_state=True))
    await first.aclose()
    second = watchers.watch(present_state=True)
    await told(second, 5)
    watchers.close()
    assert [message async for message in second] == []
    third = watchers.watch(present_state=True)
    await told(third, 5)
    await third.aclose()
    assert len(watchers) == 0


async def test_the_end_of_the_service_ends_it() -> None:
    watchers = Watchers("epoch", WatchLimits(1, 8), present_state=lambda: many(1000))
    watch = watchers.watch(present_state=True)
    await told(watch, 2)
    watchers.close()
    assert len([message async for message in watch]) < MAX_SLICE


async def test_who_takes_nothing_is_cut_off_and_its_place_is_free() -> None:
    class Stuck:
        async def write(self, message: object) -> None:
            await asyncio.Event().wait()

    watchers = Watchers("epoch", WatchLimits(1, 8, write_timeout_s=0.01))
    with pytest.raises(WatcherTooSlow, match="took no message"):
        await watchers.serve(Stuck())
    assert len(watchers) == 0


async def test_the_manager_hears_whether_anybody_watches() -> None:
    heard: list[bool] = []
    watchers = Watchers("epoch", WatchLimits(2, 8), heard.append)
    one, two = watchers.watch(), watchers.watch()
    await told(one, 1), await told(two, 1)
    await one.aclose()
    assert heard[-1]
    await two.aclose()
    assert not heard[-1]
    again = watchers.watch()
    assert await told(again, 1) == [(1, "")], "events may be missing since: a gap"
    assert heard[-1]
    await again.aclose()


async def test_there_are_only_so_many_watchers() -> None:
    watchers = Watchers("epoch", WatchLimits(1, 2))
    first = watchers.watch()
    await told(first, 1)
    with pytest.raises(TooMany, match="watch"):
        await anext(watchers.watch())
    await first.aclose()
    assert len(watchers) == 0
    second = watchers.watch()
    await told(second, 1)
    await second.aclose()


async def test_close_ends_each_watch_after_its_queue() -> None:
    watchers = Watchers("epoch", WatchLimits(1, 2))
    watch = watchers.watch()
    await told(watch, 1)
    watchers.tell([event(1)])
    watchers.close()
    assert await told(watch, 1) == [(1, "w1")]
    with pytest.raises(StopAsyncIteration):
        await anext(watch)
