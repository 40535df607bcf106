"""Requests that bypass the cache: they find nothing, leave nothing, and hold no more pages than they need."""

from __future__ import annotations

import pytest

from cache_service.core.base.types import FetchPolicy, SpillPolicy, Stored
from session.words import GroupSpec, HostTierKind, MissReason
from tests.core.at_once import clear_at_once
from tests.core.driver import FakeWorker
from tests.core.oracle import Oracle
from tests.core.test_cases_pages import span, spare
from tests.core.world import FINISHED, NS, PREEMPTED, World, full, state, window

LAYOUTS = [(full(32),), (full(32), window(32, 4)), (full(32), window(32, 4), state(16)), (window(32, 4), state(16))]


def stage(*groups: GroupSpec) -> FakeWorker:
    world = World(watch=True, spill=SpillPolicy.WRITE_THROUGH, fetch=FetchPolicy.ALWAYS)
    return FakeWorker(world, groups, 2, host_tier=HostTierKind.SHARED, host_tier_id="redis")


@pytest.mark.parametrize("groups", LAYOUTS)
def test_nothing_is_found_and_nothing_is_left(groups: tuple[GroupSpec, ...]) -> None:
    worker = stage(*groups)
    oracle = Oracle(worker)
    worker.run(span(1, 9))
    worker.world.tick()
    worker.spill_all()
    worker.world.events.clear()
    before = [spare(worker, group) for group in range(len(groups))]
    live = worker.start([*span(1, 9), 10, 11], chunk=4, bypass=True)
    assert live.grant.usable_tokens == live.grant.match.matched_tokens == live.grant.match.host_tokens == 0
    assert live.grant.match.miss_reason is MissReason.BYPASSED and not live.grant.snapshots and not live.grant.rolling
    worker.prefill(live, 4)
    worker.decode(live, span(50, 59))
    oracle.check()
    worker.release(live, FINISHED)
    oracle.check()
    assert not [event for event in worker.world.events if isinstance(event, Stored)]
    worker.world.tick()
    assert not worker.spills
    assert [spare(worker, group) for group in range(len(groups))] == before
    assert worker.world.tokens_cached([*span(1, 9), 10, 11, *span(50, 59), 1]) <= 8
    (stats,) = worker.world.manager.stats().workers
    assert dict(stats.misses)[MissReason.BYPASSED] == 1


def test_its_window_slides_and_its_pages_go_free() -> None:
    """A window of 4 tokens and pages of 2: three pages are held, however long the sequence gets."""
    worker = stage(full(32), window(5, 4))
    live = worker.start(span(1, 8), chunk=2, bypass=True)
    worker.prefill(live, 2)
    worker.decode(live, span(9, 40))
    assert worker.world.manager.stats().workers[0].groups[1].num_free >= 2


def test_it_holds_pages_of_its_own_even_when_its_twin_is_cached() -> None:
    worker = FakeWorker(World(), [full(9)], 2)
    worker.run(span(1, 8))
    live = worker.start(span(1, 8), bypass=True)
    worker.prefill(live)
    assert spare(worker) == 5
    other = worker.start([*span(1, 8), 9])
    assert other.grant.usable_tokens == 8 and not set(other.table()) & set(live.table())


@pytest.mark.parametrize("groups", LAYOUTS)
def test_it_is_adopted_as_what_it_is(groups: tuple[GroupSpec, ...]) -> None:
    worker = stage(*groups)
    live = worker.start(span(1, 9), bypass=True)
    worker.prefill(live)
    worker.decode(live, [10, 11])
    worker.world.new_manager()
    worker.hello()
    oracle = Oracle(worker)
    worker.adopt(live)
    worker.decode(live, [12, 13])
    oracle.check()
    assert worker.world.tokens_cached(span(1, 14)) == 0
    worker.release(live)
    oracle.check()
    assert [spare(worker, group) for group in range(len(groups))] == [spec.num_pages for spec in groups]


def test_what_it_bypasses_may_be_cleared_beside_it() -> None:
    worker = stage(full(16))
    worker.run(span(1, 8))
    worker.spill_all()
    live = worker.start(span(1, 8), bypass=True)
    assert clear_at_once(worker.world.manager, NS, True).num_pages == 4
    worker.world.settle()
    worker.prefill(live)
    worker.release(live)
    assert spare(worker) == 16


def test_a_preempted_one_is_kept_and_bypasses_again() -> None:
    worker = stage(full(8))
    live = worker.start(span(1, 6), bypass=True)
    worker.prefill(live)
    worker.release(live, PREEMPTED)
    again = worker.start([*span(1, 6), 7], sequence_id=live.id, bypass=True, kept=6)
    worker.prefill(again)
    assert worker.world.tokens_cached([*span(1, 6), 7, 8]) == 0
