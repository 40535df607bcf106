"""What the manager does with a worker's inventory: it caches the runs, held by nobody, and refuses what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from cache_service.core import audit
from cache_service.core.base.cleared_scopes import MAX_LEFT, MAX_SCOPES, ClearedScopes
from cache_service.core.base.errors import Superseded
from cache_service.core.base.types import Stored
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from session.messages import (
    Acquire,
    Adopt,
    BadRun,
    CachedRun,
    Extend,
    Forget,
    Grant,
    Hello,
    Inventory,
    Publish,
    RunRefusal,
    Step,
    StepReply,
)
from session.protocol import CAPABILITIES
from session.words import (
    GroupPages,
    GroupSpec,
    Namespace,
    PageId,
    RefusalReason,
    SequenceId,
    SnapshotSlot,
    WorkerId,
)
from tests.core.world import NS, full, ids, pack, state, window

WORKER = WorkerId("w")
PAGE = 2
TENANT = Namespace("model", salt="tenant")


class Stage:
    """A manager with one worker, audited after each step."""

    def __init__(self, *groups: GroupSpec, **config: Any) -> None:
        self.manager = CacheManager(ManagerConfig(**config), "epoch")
        self.hello = Hello(
            WORKER, "h:1", "first", b"f" * 32, PAGE, groups or (full(20),), model="model", capabilities=CAPABILITIES
        )
        self.manager.hello(self.hello, 0)
        self.last = 0

    def go_away(self) -> None:
        """For longer than the grace period."""
        self.manager.disconnect(WORKER, self.hello.incarnation, self.last)
        self.manager.tick(self.last + self.manager.config.grace_ms)
        assert not self.manager.workers

    def come_back(self) -> None:
        self.manager.hello(self.hello, self.last)
        self.last = 0

    def step(self, **items: Any) -> StepReply:
        self.last += 1
        reply = self.manager.step(WORKER, Step(self.last, **items), self.last)
        audit.check(self.manager)
        return reply

    def offer(self, *runs: CachedRun | BadRun, is_complete: bool = False) -> tuple[RunRefusal, ...]:
        return self.step(inventory=Inventory(runs, is_complete)).run_refusals

    def acquire(self, number: int, tokens: list[int], namespace: Namespace = NS) -> Grant:
        (grant,) = self.step(acquires=(Acquire(SequenceId(number), namespace, pack(tokens)),)).grants
        return grant

    def cached(self, tokens: list[int], namespace: Namespace = NS) -> int:
        (found,) = self.manager.match(namespace, pack([*tokens, 99]))
        return found.match.usable_tokens

    @property
    def restored(self) -> int:
        return self.manager.stats().workers[0].restored_tokens


def run(number: int, tokens: list[int], *page_ids: list[int], parent: int = 0, namespace: Namespace = NS) -> CachedRun:
    return CachedRun(number, parent, None if parent else namespace, pack(tokens), tuple(pack(row) for row in page_ids))


TRUNK = run(1, [1, 2, 3, 4], [7, 5])
LEFT = run(2, [5, 6], [3], parent=1)
RIGHT = run(3, [8, 9, 8, 9], [11, 12], parent=1)


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
    """What hangs on the run must not come to hang on those."""
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
    slots = {"working": (SnapshotSlot(1, 0, PageId(1)),), "rolling": (SnapshotSlot(1, 0, PageId(2)),)}
    item = Adopt(SequenceId(1), NS, pack(range(8)), 7, (GroupPages(0, 0, pack([1, 2, 3, 4])),), **slots)
    assert not stage.step(adopts=(item,)).refusals
    (extend,) = stage.step(extends=(Extend(SequenceId(1), 9),)).extends
    assert extend.leave == ()


# -- what is refused --

BAD: list[tuple[str, CachedRun]] = [
    ("run", run(0, [1, 2], [9])),
    ("run", run(1, [1, 2], [9])),
    ("parent_run", run(5, [1, 2], [9], parent=4)),
    ("namespace", CachedRun(5, 0, None, pack([1, 2]), (pack([9]),))),
    ("namespace.model", run(5, [1, 2], [9], namespace=Namespace("other"))),
    ("namespace.salt", run(5, [1, 2], [9], namespace=Namespace("model", salt="s" * 300))),
    ("tokens", CachedRun(5, 0, NS, b"", (b"",))),
    ("tokens", CachedRun(5, 0, NS, b"12345", (pack([9]),))),
    ("tokens", run(5, [1, 2, 3], [9])),
    ("tokens", run(5, [1] * 42, list(range(21)))),
    ("page_ids", run(5, [1, 2])),
    ("page_ids", run(5, [1, 2], [9], [9])),
    ("page_ids[0]", run(5, [1, 2], [9, 10])),
    ("page_ids[0]", run(5, [1, 2], [21])),
    ("page_ids[0]", run(5, [1, 2, 3, 4], [9, 9])),
    ("page_ids[0]", run(5, [1, 2, 3, 4], [9, 0])),
]


@pytest.mark.parametrize(("field", "bad"), BAD)
def test_a_bad_run_is_refused_alone_and_changes_nothing(field: str, bad: CachedRun) -> None:
    stage = Stage(max_sequence_tokens=40)
    stage.offer(TRUNK)
    before = stage.manager.stats()
    (refused,) = stage.offer(bad)
    assert (refused.run, refused.reason) == (bad.run, RefusalReason.INVALID)
    assert refused.field == f"step.inventory.runs[0].{field}"
    assert stage.manager.stats() == before
    after = run(6, [5, 6], [3], parent=1)
    assert len(stage.offer(bad, after)) == 1
    assert stage.cached([1, 2, 3, 4, 5, 6]) == 6


def test_a_malformed_run_is_refused_in_its_place() -> None:
    stage = Stage()
    refused = stage.offer(TRUNK, BadRun(2, "tokens", "is empty"))
    assert refused == (RunRefusal(2, RefusalReason.INVALID, "is empty", "step.inventory.runs[1].tokens"),)


def test_a_step_names_no_more_pages_than_it_may() -> None:
    stage = Stage(max_adopt_pages=3)
    refused = stage.offer(TRUNK, RIGHT)
    assert [refusal.field for refusal in refused] == ["step.inventory.runs[1].page_ids"]
    assert stage.offer(RIGHT) == ()


def test_nothing_follows_the_end_of_the_inventory() -> None:
    stage = Stage()
    stage.offer(TRUNK, is_complete=True)
    (refused,) = stage.offer(LEFT)
    assert refused.field == "step.inventory.runs[0].run"
    assert not len(stage.manager.worker(WORKER).restored)


def test_runs_that_bring_nothing_are_bounded() -> None:
    stage = Stage()
    refused: tuple[RunRefusal, ...] = ()
    for number in range(1, 30):
        refused += stage.offer(run(number, [1, 2], [7]))
    assert [refusal.run for refusal in refused] == list(range(21, 30))


# -- Clear --


def test_a_clear_between_two_slices_keeps_the_rest_of_its_namespace_out() -> None:
    stage = Stage()
    stage.offer(TRUNK, run(2, [1, 2], [9], namespace=TENANT))
    stage.manager.clear(TENANT, unused_only=False)
    refused = stage.offer(run(4, [3, 4], [10], parent=2), run(5, [7, 7], [13], namespace=TENANT), LEFT_LATER)
    details = {4: "the run before it was evicted", 5: "the namespace was cleared"}
    assert {refusal.run: refusal.detail for refusal in refused} == details
    assert stage.cached([1, 2], TENANT) == 0
    assert stage.cached([1, 2, 3, 4, 5, 6]) == 6
    stage.manager.clear(None, unused_only=False)
    (refused_run,) = stage.offer(run(9, [1, 2], [7]))
    assert refused_run.field == "step.inventory.runs[0].run"


LEFT_LATER = run(6, [5, 6], [3], parent=1)


def test_a_clear_of_what_nobody_holds_keeps_runs_out_behind_what_somebody_holds() -> None:
    stage = Stage()
    assert stage.offer(TRUNK) == ()
    assert stage.acquire(1, [1, 2, 3, 4, 7]).cached_tokens == 4
    stage.manager.clear(NS, unused_only=True)
    (refused,) = stage.offer(LEFT)
    assert (refused.reason, refused.detail) == (RefusalReason.NO_ROOM, "the namespace was cleared")
    assert stage.cached([1, 2, 3, 4, 5, 6]) == 4


@pytest.mark.parametrize("cleared", [NS, None])
def test_a_clear_before_an_adopt_keeps_its_pages_out(cleared: Namespace | None) -> None:
    """The sequence queues again and is computed anew; one that leaves nothing for others goes on."""
    stage = Stage()
    stage.manager.clear(cleared, unused_only=False)
    (refusal,) = stage.step(adopts=(_adopt(1, [1, 2, 3], [7, 5]),)).refusals
    assert (refusal.reason, refusal.detail) == (RefusalReason.NO_ROOM, "the namespace was cleared")
    assert stage.cached([1, 2]) == 0
    bypassing = _adopt(2, [1, 2, 3], [7, 5])._replace(bypass_cache=True)
    assert len(stage.step(adopts=(bypassing,)).grants) == 1
    assert stage.cached([1, 2]) == 0


@pytest.mark.parametrize("cleared", [NS, None])
def test_a_clear_while_a_worker_is_away_keeps_out_what_is_older(cleared: Namespace | None) -> None:
    """Its state has been dropped, so that no lease tells the Clear call of the sequence."""
    stage = Stage(grace_ms=10)
    stage.acquire(1, [1, 2, 3])
    stage.go_away()
    stage.manager.clear(cleared, unused_only=False)
    stage.come_back()
    (refusal,) = stage.step(adopts=(_adopt(1, [1, 2, 3], [7, 5]),)).refusals
    assert (refusal.reason, refusal.detail) == (RefusalReason.NO_ROOM, "the namespace was cleared")
    assert stage.cached([1, 2]) == 0
    other = _adopt(2, [1, 2, 3], [7, 5])._replace(namespace=TENANT)
    assert len(stage.step(adopts=(other,)).grants) == (cleared is not None)


def test_a_clear_that_was_missed_once_is_missed_until_everything_is_adopted() -> None:
    stage = Stage(grace_ms=10)
    stage.go_away()
    stage.manager.clear(NS, unused_only=False)
    for _ in range(2):  # nothing was adopted yet
        stage.come_back()
        stage.go_away()
    stage.come_back()
    assert stage.step(adopts=(_adopt(1, [1, 2, 3], [7, 5]),)).refusals
    stage.offer(is_complete=True)
    stage.acquire(1, [1, 2, 3])
    stage.go_away()
    stage.come_back()
    assert stage.step(adopts=(_adopt(1, [1, 2, 3], [7, 5]),)).grants, "it began after the Clear call"
    assert stage.cached([1, 2]) == 2


def test_a_sequence_that_a_clear_left_alone_is_adopted_later() -> None:
    stage = Stage(grace_ms=10)
    stage.offer(is_complete=True)
    stage.acquire(1, [1, 2, 3])
    stage.manager.clear(None, unused_only=True)
    stage.go_away()
    stage.come_back()
    assert stage.step(adopts=(_adopt(1, [1, 2, 3], [7, 5]),)).grants


def test_incarnations_without_a_state_are_bounded() -> None:
    scopes = ClearedScopes()
    for number in range(MAX_LEFT + 1):
        scopes.leave(WORKER, str(number), 3)
    assert (scopes.come_back(WORKER, "0"), scopes.come_back(WORKER, "1")) == (0, 3)
    assert scopes.come_back(WORKER, "1") == 0


def _adopt(number: int, tokens: list[int], page_ids: list[int]) -> Adopt:
    return Adopt(SequenceId(number), NS, pack(tokens), len(tokens) - 1, (GroupPages(0, 0, pack(page_ids)),))


def test_cleared_namespaces_of_a_state_are_bounded() -> None:
    stage = Stage()
    for number in range(MAX_SCOPES + 1):
        stage.manager.clear(Namespace("model", salt=str(number)), unused_only=True)
    restored = stage.manager.worker(WORKER).restored
    assert not restored.is_open
    assert restored.is_cleared(TENANT)
    (refused,) = stage.offer(run(1, [1, 2], [7]))
    assert refused.field == "step.inventory.runs[0].run"


def test_workers_are_told_what_was_cleared_and_confirm_it() -> None:
    stage = Stage()
    assert stage.manager.take_orders(WORKER) == ()
    stage.manager.clear(TENANT, unused_only=True)
    (forget,) = stage.manager.take_orders(WORKER)
    assert isinstance(forget, Forget)
    assert (forget.everything, forget.namespaces) == (False, (TENANT,))
    assert stage.manager.take_orders(WORKER) == ()
    assert stage.manager.unconfirmed() == (WORKER,)
    stage.step(forgotten=forget.number)
    assert stage.manager.unconfirmed() == ()
    with pytest.raises(Exception, match=r"step\.forgotten"):
        stage.step(forgotten=forget.number + 1)


def test_a_worker_that_comes_back_is_told_what_it_has_not_confirmed() -> None:
    stage = Stage()
    stage.manager.clear(None, unused_only=True)
    stage.manager.take_orders(WORKER)
    stage.manager.disconnect(WORKER, "first", 1)
    welcome = stage.manager.hello(stage.hello._replace(generation=1), 2)
    assert welcome.generation == 1
    assert welcome.forget is not None and welcome.forget.everything
    stage.step(forgotten=welcome.forget.number)
    stage.manager.disconnect(WORKER, "first", 3)
    assert stage.manager.hello(stage.hello._replace(generation=1), 4).forget is None
    # Another state of the same epoch: its inventory may be older than the Clear call.
    assert stage.manager.hello(stage.hello, 5).forget == welcome.forget


def test_a_worker_without_an_inventory_is_told_nothing() -> None:
    stage = Stage()
    stage.manager.hello(stage.hello._replace(capabilities=()), 0)
    stage.manager.clear(None, unused_only=True)
    assert stage.manager.take_orders(WORKER) == ()
    assert stage.manager.unconfirmed() == ()
    assert stage.manager.hello(stage.hello._replace(capabilities=()), 1).forget is None


def test_of_too_many_cleared_namespaces_everything_is_forgotten() -> None:
    scopes = ClearedScopes()
    for number in range(MAX_SCOPES):
        scopes.add(Namespace("model", salt=str(number)))
    found = scopes.since(MAX_SCOPES - 2)
    assert found is not None
    assert [name.salt for name in found.namespaces] == [str(MAX_SCOPES - 2), str(MAX_SCOPES - 1)]
    scopes.add(TENANT)
    assert scopes.since(0) == Forget(MAX_SCOPES + 1, everything=True)
    assert scopes.since(MAX_SCOPES + 1) is None


# -- incarnations --


def test_of_two_incarnations_the_one_that_started_earlier_is_refused() -> None:
    """After a restart of the service, which has forgotten who replaced whom."""
    stage = Stage()
    older = stage.hello._replace(incarnation="older", started_ns=1_000_000_000)
    newer = stage.hello._replace(incarnation="newer", started_ns=3_500_000_000)
    manager = CacheManager(ManagerConfig(), "epoch-2")
    manager.hello(newer, 0)
    with pytest.raises(
        Superseded, match=r"hello\.incarnation: an incarnation of w that started 2\.500 s later is here"
    ):
        manager.hello(older, 1)
    assert manager.workers[WORKER].hello.incarnation == "newer"
    manager.disconnect(WORKER, "newer", 2)  # away for a moment
    with pytest.raises(Superseded):
        manager.hello(older, 3)
    assert manager.hello(newer._replace(generation=1), 4).generation == 1


def test_the_later_one_takes_over_whoever_comes_first() -> None:
    stage = Stage()
    older = stage.hello._replace(incarnation="older", started_ns=1)
    manager = CacheManager(ManagerConfig(), "epoch-2")
    manager.hello(older, 0)
    manager.hello(older._replace(incarnation="newer", started_ns=2), 1)
    with pytest.raises(Superseded):
        manager.hello(older, 2)


@pytest.mark.parametrize(("present", "comes"), [(0, 1), (1, 0), (5, 5)])
def test_without_an_order_arrival_decides(present: int, comes: int) -> None:
    stage = Stage()
    manager = CacheManager(ManagerConfig(), "epoch-2")
    manager.hello(stage.hello._replace(incarnation="present", started_ns=present), 0)
    manager.hello(stage.hello._replace(incarnation="comes", started_ns=comes), 1)
    assert manager.workers[WORKER].hello.incarnation == "comes"


def _published(number: int, computed: int) -> Publish:
    return Publish(SequenceId(number), b"", computed)
