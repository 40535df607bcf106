"""What the manager does with a worker's inventory: it caches the runs, held by nobody."""

from __future__ import annotations

from cache_service.core.base.types import Stored
from session.messages import Acquire, Adopt, Extend, Inventory, Publish
from session.words import GroupPages, PageId, RefusalReason, SequenceId, StateSlot
from tests.core.inventory_stage import LEFT, RIGHT, TRUNK, WORKER, Stage, run
from tests.core.world import NS, full, ids, pack, state, window


def test_runs_are_cached_and_nobody_holds_them() -> None:
    stage = Stage()
    assert stage.offer(TRUNK, LEFT) == ()
    assert stage.offer(RIGHT, is_complete=True) == ()
    assert stage.cached([1, 2, 3, 4, 5, 6]) == 6
    assert stage.cached([1, 2, 3, 4, 8, 9, 8, 9]) == 8
    (group,) = stage.manager.stats().workers[0].groups
    assert (group.num_free, group.num_evictable) == (15, 5)
    assert stage.restored == 10
    grant = stage.acquire(1, [1, 2, 3, 4, 8, 9, 7])
    assert grant.cached_tokens == 6
    assert ids(grant.tables[0].page_ids)[:3] == [7, 5, 11]


def test_a_run_that_came_first_is_evicted_first() -> None:
    stage = Stage(full(6), policy="lru")
    stage.offer(*[run(number, [number] * 2, [number]) for number in (3, 4, 5)])
    stage.acquire(1, [9] * 8)
    assert [stage.cached([number] * 2) > 0 for number in (3, 4, 5)] == [False, True, True]


def test_pages_that_stand_already_stay_as_they_are() -> None:
    """A request has computed the same tokens meanwhile; what the run adds hangs behind."""
    stage = Stage()
    grant = stage.acquire(1, [1, 2, 3])
    stage.manager.publish(WORKER, _published(1, 3))
    own = ids(grant.tables[0].page_ids)[0]
    assert stage.offer(run(1, [1, 2, 3, 4], [7, 5]), run(2, [5, 6], [8], parent=1)) == ()
    assert stage.cached([1, 2, 3, 4, 5, 6]) == 6
    assert stage.restored == 4
    again = stage.acquire(2, [1, 2, 3, 4, 5, 6, 7])
    assert ids(again.tables[0].page_ids)[:3] == [own, 5, 8]


def test_a_page_that_is_taken_refuses_its_run_and_what_hangs_on_it() -> None:
    stage = Stage()
    grant = stage.acquire(1, [9] * 4)
    taken = ids(grant.tables[0].page_ids)[0]
    refused = stage.offer(run(1, [1, 2], [7]), run(2, [3, 4], [taken], parent=1), run(3, [5, 6], [9], parent=2))
    assert [(refusal.run, refusal.reason) for refusal in refused] == [
        (2, RefusalReason.NO_ROOM),
        (3, RefusalReason.INVALID),
    ]
    assert refused[1].field == "step.inventory.runs[2].parent_run"
    assert stage.cached([1, 2, 3, 4, 5, 6]) == 2


def test_a_refused_run_bars_no_acquire_and_comes_before_it() -> None:
    """Pages of the inventory are taken before the same step's acquire takes any."""
    stage = Stage(full(4))
    items = Inventory((run(1, [1, 2], [1]), run(2, [3, 4], [1])), is_complete=False)
    reply = stage.step(inventory=items, acquires=(Acquire(SequenceId(1), NS, pack([1, 2, 9])),))
    (grant,) = reply.grants
    assert grant.cached_tokens == 2
    assert [refusal.run for refusal in reply.run_refusals] == [2]


def test_the_run_before_was_evicted() -> None:
    stage = Stage(full(4))
    stage.offer(run(1, [1, 2, 3, 4], [4, 2]))
    stage.acquire(1, [9] * 8)
    (refused,) = stage.offer(LEFT)
    assert (refused.reason, refused.detail) == (RefusalReason.NO_ROOM, "the run before it was evicted")


def test_the_run_before_lost_its_tail_and_its_node_went_on_with_other_tokens() -> None:
    """What follows the run must not come to follow those."""
    stage = Stage()
    stage.offer(TRUNK)
    stage.manager.worker(WORKER).evict(1)
    stage.acquire(1, [1, 2, 9, 9, 9])
    stage.manager.publish(WORKER, _published(1, 4))
    (refused,) = stage.offer(LEFT)
    assert (refused.reason, refused.detail) == (RefusalReason.NO_ROOM, "the run before it was evicted")
    assert stage.cached([1, 2, 9, 9, 5, 6]) == 4


def test_the_run_before_was_split_and_has_grown() -> None:
    stage = Stage()
    stage.offer(TRUNK)
    stage.acquire(1, [1, 2, 8, 8])  # parts inside the trunk
    stage.manager.publish(WORKER, _published(1, 4))
    stage.acquire(2, [1, 2, 3, 4, 7, 7])  # goes on behind it
    stage.manager.publish(WORKER, _published(2, 6))
    assert stage.offer(LEFT, RIGHT) == ()
    assert stage.cached([1, 2, 3, 4, 5, 6]) == 6
    assert stage.cached([1, 2, 3, 4, 7, 7]) == 6


def test_windows_and_snapshots_come_with_their_holes() -> None:
    stage = Stage(full(20), window(8, 3), state(8))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    assert stage.offer(run(1, tokens, [4, 3, 2, 1], [0, 5, 6, 0], [0, 0, 2, 0])) == ()
    assert stage.cached(tokens) == 6
    # Another worker's life of the same path brings what was missing.
    assert stage.offer(run(2, tokens, [14, 13, 12, 11], [0, 5, 0, 7], [0, 0, 0, 3])) == ()
    assert stage.cached(tokens) == 8
    window_stats, state_stats = stage.manager.stats().workers[0].groups[1:]
    assert (window_stats.num_evictable, state_stats.num_evictable) == (3, 2)


def test_a_window_page_that_is_taken_is_left_out() -> None:
    stage = Stage(full(20), window(8, 3))
    grant = stage.acquire(1, [9, 9, 9])
    taken = ids(grant.tables[1].page_ids)[0]
    assert stage.offer(run(1, [1, 2, 3, 4], [14, 15], [taken, 0])) == ()
    assert stage.restored == 4


def test_restored_pages_are_told_to_watchers() -> None:
    stage = Stage(watch=True)
    stage.offer(TRUNK, LEFT)
    stored = [found for found in stage.manager.take_events() if isinstance(found, Stored)]
    assert [len(found.page_hashes) for found in stored] == [2, 1]
    assert stored[1].parent_hash == stored[0].page_hashes[1]


def test_an_adopted_window_fills_the_holes_of_the_path_that_it_shares() -> None:
    """Two sequences shared FULL pages; the first to be adopted has left behind the window page that the other reads."""
    stage = Stage(full(20), window(8, 3))
    first = Adopt(
        SequenceId(1),
        NS,
        pack(list(range(10))),
        8,
        (GroupPages(0, 0, pack([1, 2, 3, 4, 5])), GroupPages(1, 0, pack([0, 0, 0, 4, 5]))),
    )
    second = Adopt(
        SequenceId(2),
        NS,
        pack([0, 1, 2, 3, 9]),
        4,
        (GroupPages(0, 0, pack([1, 2, 6])), GroupPages(1, 0, pack([0, 7, 8]))),
    )
    assert not stage.step(adopts=(first,)).refusals
    assert not stage.step(adopts=(second,)).refusals
    assert stage.cached([0, 1, 2, 3]) == 4


def test_a_snapshot_at_a_boundary_that_a_launch_may_have_passed_is_not_asked_for() -> None:
    """An adopted sequence that decodes runs on in the pages that it has before its first extend."""
    stage = Stage(full(20), state(8))
    slots = {"working": (StateSlot(1, 0, PageId(1)),), "rolling": (StateSlot(1, 0, PageId(2)),)}
    item = Adopt(SequenceId(1), NS, pack(range(8)), 7, (GroupPages(0, 0, pack([1, 2, 3, 4])),), **slots)
    assert not stage.step(adopts=(item,)).refusals
    (extend,) = stage.step(extends=(Extend(SequenceId(1), 9),)).extends
    assert extend.snapshots == ()


def _published(number: int, computed: int) -> Publish:
    return Publish(SequenceId(number), b"", computed)
