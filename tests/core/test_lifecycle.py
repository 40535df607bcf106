"""Sessions that break: repeated steps, incarnations, grace, restarts of either side, adoption."""

from __future__ import annotations

import pytest

from cache_service.core.base.errors import Superseded, UnknownWorker
from cache_service.core.base.types import Cleared, FetchPolicy, Removed, SpillPolicy
from session.messages import Ack, Acquire, Extend, Refusal, Step
from session.words import GroupSpec, HostTierKind, RefusalReason, SequenceId, WorkerId
from tests.core.driver import FakeWorker
from tests.core.oracle import Oracle
from tests.core.test_cases_pages import make, span, spare
from tests.core.world import ABORTED, DONE, NS, Live, World, full, pack, state, window

ALL_KINDS = (full(16), window(16, 4), state(12))


def test_a_repeated_step_is_answered_not_applied_twice() -> None:
    worker = make(8)
    acquire = Acquire(SequenceId(5), NS, pack(span(1, 8)))
    reply = worker.step(acquires=[acquire])
    before = worker.world.snapshot()
    assert worker.last_step is not None
    assert worker.world.manager.step(worker.id, worker.last_step, worker.world.now_ms) == reply
    assert worker.world.snapshot() == before


@pytest.mark.parametrize("step_id", [0, 1])
def test_step_ids_never_go_back(step_id: int) -> None:
    worker = make(8)
    worker.step()
    worker.step()
    world = worker.world
    world.unchanged(world.manager.step, worker.id, Step(step_id), world.now_ms)


def test_the_same_incarnation_comes_back_to_its_pages() -> None:
    worker = make(8)
    live = worker.start(span(1, 9))
    worker.launch(live)
    worker.disconnect()
    worker.world.tick(5_000)
    welcome = worker.hello()
    assert worker.goes_on and welcome.last_step_id == worker.applied
    worker.publish(live)
    worker.world.tick(20_000)
    assert worker.world.tokens_cached(span(1, 9)) == 8


def test_grace_ends_leases_and_device_pages() -> None:
    world = World(watch=True, grace_ms=1_000)
    worker = FakeWorker(world, ALL_KINDS, 4)
    worker.prefill(worker.start(span(1, 9)))
    worker.disconnect()
    world.tick(999)
    assert world.manager.stats().workers[0].num_leases == 1
    world.tick(2)
    assert not [w for w in world.manager.stats().workers if w.num_leases]
    assert not [m for m in world.manager.match(NS, pack(span(1, 9))) if m.match.usable_tokens]
    assert isinstance(world.events[-1], Cleared | Removed)
    worker.restart("i1")
    assert worker.start(span(1, 9)).grant.usable_tokens == 0


def test_case_37_a_new_incarnation_forgets_and_the_old_is_refused() -> None:
    worker = make(8)
    live = worker.start(span(1, 9))
    worker.prefill(live)
    world = worker.world
    worker.restart("i1")
    assert world.tokens_cached(span(1, 9)) == 0
    assert spare(worker) == 8
    worker.incarnation = "i0"
    with pytest.raises(Superseded):
        worker.hello()
    before = world.snapshot()
    world.manager.disconnect(worker.id, "i0", world.now_ms)
    world.settle()
    assert world.snapshot() == before, "the old stream's end says nothing about the new one"
    worker.incarnation = "i1"
    worker.start(span(1, 9))


def test_goodbye_forgets_at_once() -> None:
    worker = make(8)
    worker.prefill(worker.start(span(1, 9)))
    worker.world.manager.goodbye(worker.id)
    worker.connected = False
    worker.world.settle()
    assert not worker.world.manager.match(NS, pack(span(1, 9)))
    with pytest.raises(UnknownWorker):
        worker.world.manager.step(worker.id, Step(99), worker.world.now_ms)


def test_other_workers_do_not_notice_a_death() -> None:
    world = World(watch=True, grace_ms=10)
    one, two = FakeWorker(world, [full(8)], 4, "w0"), FakeWorker(world, [full(8)], 4, "w1")
    live = two.start(span(1, 9))
    two.launch(live)
    one.prefill(one.start(span(1, 9)))
    one.disconnect()
    world.tick(100)
    two.publish(live)
    assert world.tokens_cached(span(1, 9), worker="w1") == 8


def lose_manager(worker: FakeWorker) -> None:
    """The cache service restarts; the worker says Hello with what it runs."""
    worker.world.new_manager()
    worker.step_id, worker.spills = 0, []
    welcome = worker.hello()
    assert not worker.goes_on and welcome.last_step_id == 0


@pytest.mark.parametrize("groups", [(full(16),), (full(16), window(16, 4)), (full(16), state(12)), ALL_KINDS])
def test_live_sequences_are_adopted_and_finish(groups: tuple[GroupSpec, ...]) -> None:
    worker = FakeWorker(World(watch=True), groups, 2)
    mid_prefill, decoding = worker.start(span(1, 9), chunk=4), worker.start(span(101, 105))
    worker.launch(mid_prefill, 4)
    worker.publish(mid_prefill)
    worker.prefill(decoding)
    worker.decode(decoding, [106, 107, 108])
    worker.decode(decoding, [109], publish=False)
    lose_manager(worker)
    oracle = Oracle(worker)
    for live in (mid_prefill, decoding):
        assert not isinstance(worker.adopt(live), Refusal)
    oracle.check()
    assert worker.world.tokens_cached([*span(101, 109), 0]) == 8 or len(groups) > 1
    worker.prefill(mid_prefill, 4)
    worker.decode(decoding, [110, 111])
    for live in (mid_prefill, decoding):
        worker.release(live)
    oracle.check()
    assert [spare(worker, g) for g in range(len(groups))] == [spec.num_pages for spec in groups]
    worker.prefill(worker.start([*span(1, 9), 0]))
    worker.prefill(worker.start([*span(101, 111), 0]))


def test_adopted_sharers_keep_sharing() -> None:
    worker = make(8, 2)
    one = worker.start(span(1, 6))
    worker.prefill(one)
    two = worker.start([*span(1, 6), 7, 8])
    worker.prefill(two)
    lose_manager(worker)
    for live in (one, two):
        worker.adopt(live)
    assert one.table()[:3] == two.table()[:3]
    assert spare(worker) == 8 - 4
    worker.release(one)
    worker.check_reads(two)
    worker.release(two)
    assert spare(worker) == 8


def test_adopted_twins_merge() -> None:
    """Both computed the same before anything was published: one copy stays."""
    worker = make(8, 2)
    one, two = worker.start(span(1, 6)), worker.start(span(1, 6))
    worker.launch(one)
    worker.launch(two)
    lose_manager(worker)
    worker.adopt(one)
    worker.adopt(two)
    assert one.table() == two.table()
    assert spare(worker) == 8 - 3


def test_adopt_refuses_pages_that_another_sequence_holds() -> None:
    worker = make(8, 2)
    one = worker.start(span(1, 5))
    worker.launch(one)
    two = worker.start(span(11, 15))
    worker.launch(two)
    two.tables = [dict(one.tables[0])]
    lose_manager(worker)
    worker.adopt(one)
    world = worker.world
    before = world.snapshot()
    reply = worker.step(adopts=[worker.adopt_of(two)])
    assert [(r.sequence_id, r.reason) for r in reply.refusals] == [(two.id, RefusalReason.NO_ROOM)]
    assert world.snapshot() == before


def test_adopt_of_a_known_sequence_is_refused() -> None:
    worker = make(8, 2)
    live = worker.start(span(1, 5))
    worker.launch(live)
    before = worker.world.snapshot()
    reply = worker.raw_step(adopts=[worker.adopt_of(live)])
    assert [(r.reason, r.field) for r in reply.refusals] == [(RefusalReason.INVALID, "step.adopts[0].sequence_id")]
    assert worker.world.snapshot() == before


def test_no_later_acquire_is_granted_after_a_no_room() -> None:
    worker = make(4, 2)
    acquires = [
        Acquire(SequenceId(i), NS, pack(span(100 * i, 100 * i + n))) for i, n in ((1, 3), (2, 5), (3, 0), (4, 30))
    ]
    reply = worker.step(acquires=acquires)
    assert [g.sequence_id for g in reply.grants] == [1]
    assert [r.sequence_id for r in reply.refusals] == [2, 3, 4]
    assert [r.reason for r in reply.refusals[:2]] == [RefusalReason.NO_ROOM] * 2
    live = worker.taken(acquires[0], reply)
    assert isinstance(live, Live)
    worker.release(live, ABORTED)
    worker.start([1])


def test_a_never_fits_does_not_stop_the_others() -> None:
    worker = make(4, 2)
    acquires = [Acquire(SequenceId(i), NS, pack(span(1, n))) for i, n in ((1, 99), (2, 4))]
    reply = worker.step(acquires=acquires)
    assert [g.sequence_id for g in reply.grants] == [2]
    assert [(r.sequence_id, r.reason) for r in reply.refusals] == [(1, RefusalReason.NEVER_FITS)]


def test_a_refused_extend_keeps_its_pages_and_stops_no_other() -> None:
    worker = make(4, 2)
    big, small = worker.start(span(1, 4)), worker.start(span(11, 13))
    worker.prefill(big)
    worker.prefill(small)
    before = worker.world.snapshot()
    reply = worker.step(extends=[Extend(SequenceId(big.id), 8), Extend(SequenceId(small.id), 4)])
    assert [r.sequence_id for r in reply.refusals] == [big.id]
    assert worker.world.snapshot() == before
    worker.check_reads(big)


def test_spill_orders_of_a_broken_stream_pin_nothing_for_ever() -> None:
    world = World(watch=True, spill=SpillPolicy.WRITE_THROUGH, fetch=FetchPolicy.ALWAYS)
    worker = FakeWorker(world, [full(4)], 2, host_tier=HostTierKind.SHARED, host_tier_id="redis")
    worker.run(span(1, 8))
    world.tick()
    assert worker.spills
    late = worker.spills[0][0]
    worker.disconnect()
    worker.spills.clear()
    worker.hello()
    assert world.manager.stats().workers[0].num_tickets == len(worker.spills)
    rows = world.manager.stats().host_tier.num_rows
    worker.step(acks=[Ack(late.ticket, late.num_pages, DONE)])
    assert world.manager.stats().host_tier.num_rows == rows, "nobody knows whether a drained copy was whole"
    worker.spill_all()
    worker.prefill(worker.start(span(50, 57)))


def test_unknown_workers_are_refused() -> None:
    world = World()
    with pytest.raises(UnknownWorker):
        world.manager.step(WorkerId("nobody"), Step(1), world.now_ms)
    with pytest.raises(UnknownWorker):
        world.manager.match(NS, pack([1]), WorkerId("nobody"))
    assert world.manager.match(NS, pack([1])) == ()
