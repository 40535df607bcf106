"""A snapshot that cannot be brought, or went: the next best boundary is resumed from, never a state of zeros.

The driver checks each snapshot that a grant names, and each state that a launch goes on from, against its prefix.
"""

from __future__ import annotations

import pytest

from session.words import TransferStatus
from tests.core.driver import FakeWorker
from tests.core.host_stage import join, spill, stage
from tests.core.oracle import Oracle
from tests.core.shadow import marks_of
from tests.core.test_cases_pages import span
from tests.core.world import CORRUPT, FAILED, MISSING, NS, PREEMPTED, World, full, state

PROMPT = span(1, 21)
LATER = [*span(1, 20), 99]
BOUNDARIES = (8, 16, 20)
GROUPS = full(64), state(16, interval=8)


def far_worker() -> FakeWorker:
    """Its device is empty; the host tier has the prompt's pages, and snapshots at 8, 16 and 20."""
    world = stage(breaker_failures=100)
    near = join(world, *GROUPS, page=4)
    near.run(PROMPT)
    spill(near)
    return join(world, *GROUPS, page=4, name="far")


def lose(worker: FakeWorker, *boundaries: int) -> None:
    """The snapshots there vanish from the host tier."""
    marks = marks_of(NS, PROMPT)
    lost = {("state", marks[boundary - 1]) for boundary in boundaries}
    keys = [key for key, value in worker.store.items() if value in lost]
    assert len(keys) == len(boundaries)
    for key in keys:
        del worker.store[key]


@pytest.mark.parametrize("status", [MISSING, CORRUPT])
@pytest.mark.parametrize(("lost", "usable"), [((), 20), ((16,), 20), ((20,), 16), ((16, 20), 8), (BOUNDARIES, 0)])
def test_case_42_the_next_best_snapshot_is_fetched(lost: tuple[int, ...], usable: int, status: TransferStatus) -> None:
    worker = far_worker()
    oracle = Oracle(worker)
    lose(worker, *lost)
    live = worker.start(LATER)
    assert live.fetch is not None
    while live.fetch is not None:
        is_whole = worker.read_host(live.fetch) == live.fetch.num_pages
        worker.do_fetch(live, status=None if is_whole else status)
    assert not live.ended
    grant = live.grant
    assert (grant.usable_tokens, grant.cached_tokens + grant.fetched_tokens) == (usable, usable)
    worker.prefill(live)
    worker.release(live)
    oracle.check()


def test_a_tier_that_fails_leaves_what_the_device_has() -> None:
    """The transfer fails as a whole: the prompt goes on from the device's own snapshot."""
    worker = far_worker()
    lose(worker, 16, 20)
    live = worker.start([*span(1, 8), 77])
    worker.fetch_all(live)
    worker.prefill(live)
    worker.release(live)
    again = worker.start(LATER)
    if again.fetch is not None:
        worker.do_fetch(again, 0, FAILED)
        worker.fetch_all(again)
    assert again.grant.usable_tokens == 8
    worker.prefill(again)


def test_case_42_an_evicted_snapshot_gives_way_to_the_one_before_it() -> None:
    """Each time the deepest one goes, the prompt resumes at the next; without any it starts anew."""
    worker = FakeWorker(World(watch=True), GROUPS, 4)
    oracle = Oracle(worker)
    worker.run(PROMPT)
    (group,) = worker.world.manager.worker(worker.id).sparse
    for usable in (20, 16, 8, 0):
        assert worker.world.tokens_cached(LATER) == usable
        if group.pages.places:
            group.pages.evict_one(max(group.pages.places, key=lambda slot: group.pages.places[slot].page))
            worker.world.settle()
    worker.prefill(worker.start(PROMPT))
    oracle.check()


def test_a_broken_stream_voids_the_spill_of_a_place_that_is_empty_by_then() -> None:
    """Without a FULL group a path ends at its last snapshot: a spilled node that holds none any more is no node."""
    world = stage()
    worker = join(world, state(6))
    live = worker.start([0, 0, 0])
    worker.launch(live, 2)
    worker.decode(live, [0, 0], publish=False)
    worker.publish(live)
    worker.decode(live, [0], publish=False)
    worker.release(live, PREEMPTED)
    worker.start([0] * 6)
    worker.disconnect()
    worker.spills.clear()
    worker.hello()
    assert worker.goes_on
