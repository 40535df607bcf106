"""Watchers: the numbering, and what happens to one who falls behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cache_service.core.base.types import Cleared
from cache_service.watchers import Watchers, WatcherTooSlow, WatchLimits
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
