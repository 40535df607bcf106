"""What a session's state is: generations, adopts inside Steps, kept prompts, and a fault in the middle of a Step."""

from __future__ import annotations

from typing import Any

import pytest

from cache_service.core.base.types import Cleared, FetchPolicy, SpillPolicy
from cache_service.core.kinds.window import WindowGroup
from session.messages import Acquire, Refusal, Release
from session.words import HostTierKind, Namespace, RefusalReason, SequenceId
from tests.core.driver import FakeWorker
from tests.core.forms import python_only
from tests.core.oracle import Oracle
from tests.core.test_cases_pages import make, span, spare
from tests.core.world import ABORTED, NS, PREEMPTED, Live, World, full, pack, state, window

ALL_KINDS = (full(24), window(24, 4), state(16))


def sharing() -> FakeWorker:
    """The cache service has just restarted; two sequences had each computed the same first page, unpublished."""
    worker = make(8, 2)
    one, two = worker.start([1, 2, 3, 4]), worker.start([1, 2, 13, 14])
    worker.launch(one)
    worker.launch(two)
    worker.world.new_manager()
    worker.hello()
    return worker


# Generations.


def test_generations_are_never_used_again() -> None:
    world = World()
    one, two = FakeWorker(world, [full(8)], 2), FakeWorker(world, [full(8)], 2, "w1")
    seen = [one.generation, two.generation]
    for _ in range(3):
        one.generation = 0
        one.hello()
        seen.append(one.generation)
    one.restart("i1")
    seen.append(one.generation)
    assert len(set(seen)) == len(seen) and 0 not in seen


@pytest.mark.parametrize("generation", [0, 4711])
def test_a_hello_of_another_generation_begins_anew(generation: int) -> None:
    """Leases, tickets and pages of the state that was kept are gone; the incarnation is as welcome as before."""
    world = World(watch=True, spill=SpillPolicy.WRITE_THROUGH, fetch=FetchPolicy.ALWAYS)
    worker = FakeWorker(world, ALL_KINDS, 2, host_tier=HostTierKind.SHARED, host_tier_id="redis")
    worker.run(span(1, 9))
    live = worker.start(span(1, 12))
    worker.prefill(live)
    world.tick()
    assert worker.spills
    worker.disconnect()
    worker.spills.clear()
    worker.generation = generation
    welcome = worker.hello()
    assert not worker.goes_on and welcome.last_step_id == 0
    (stats,) = world.manager.stats().workers
    assert (stats.num_leases, stats.num_tickets, stats.num_nodes) == (0, 0, 0)
    assert Cleared(worker.id) in world.events
    assert not isinstance(worker.adopt(live), Refusal)
    worker.prefill(worker.start([*span(1, 12), 13]))


def test_a_known_generation_goes_on_whatever_the_grace_took_of_others() -> None:
    worker = make(8)
    live = worker.start(span(1, 9))
    worker.disconnect()
    worker.world.tick(5_000)
    worker.hello()
    assert worker.goes_on
    worker.prefill(live)


# Adopts inside a Step.


def test_a_lost_reply_to_an_adopt_is_asked_for_again() -> None:
    """The duplicate page of the second sequence goes free with the adopt; without its reply it would read that page."""
    worker = sharing()
    one, two = worker.live.values()
    worker.adopt(one)
    replies_lost = iter([True])
    worker.loses_reply = lambda: next(replies_lost, False)
    worker.adopt(two)
    assert two.table()[0] == one.table()[0]
    worker.start(span(50, 55))
    worker.check_reads(two)


def test_adopts_of_one_step_share_as_they_did() -> None:
    worker = sharing()
    one, two = worker.live.values()
    worker.adopt_all([one, two])
    assert one.table()[0] == two.table()[0]
    assert spare(worker) == 8 - 3


def test_adopts_come_before_extends_and_acquires() -> None:
    worker = sharing()
    one, two = worker.live.values()
    acquire = Acquire(SequenceId(90), NS, pack(span(60, 65)))
    reply = worker.step(adopts=[worker.adopt_of(one), worker.adopt_of(two)], acquires=[acquire])
    assert [grant.sequence_id for grant in reply.grants] == [one.id, two.id, 90]


def test_a_taken_page_refuses_one_adopt_and_bars_no_acquire() -> None:
    worker = sharing()
    one, two = worker.live.values()
    two.tables = [dict(one.tables[0])]
    acquire = Acquire(SequenceId(90), NS, pack(span(60, 65)))
    reply = worker.step(adopts=[worker.adopt_of(one), worker.adopt_of(two)], acquires=[acquire])
    assert [(r.sequence_id, r.reason) for r in reply.refusals] == [(two.id, RefusalReason.NO_ROOM)]
    assert [grant.sequence_id for grant in reply.grants] == [one.id, 90]


def test_one_step_adopts_at_most_so_many_pages_but_always_one_sequence() -> None:
    world = World(max_adopt_pages=3)
    worker = FakeWorker(world, [full(16)], 2)
    lives = [worker.start(span(first, first + 7)) for first in (10, 20)]
    for live in lives:
        worker.launch(live)
    world.new_manager()
    worker.hello()
    reply = worker.raw_step(adopts=[worker.adopt_of(live) for live in lives])
    assert [grant.sequence_id for grant in reply.grants] == [lives[0].id]
    assert [(r.reason, r.field) for r in reply.refusals] == [(RefusalReason.INVALID, "step.adopts[1].tables")]
    worker.adopt(lives[1])


# Kept prompts.


def full_house(**config: Any) -> tuple[FakeWorker, Live]:
    """Another sequence holds the whole pool."""
    worker = FakeWorker(World(**config), [full(4)], 2)
    return worker, worker.start(span(100, 107))


def test_a_refused_prompt_crosses_the_wire_once() -> None:
    worker, other = full_house()
    refusal = worker.refused(span(1, 6), sequence_id=7)
    assert refusal.reason is RefusalReason.NO_ROOM
    assert worker.world.manager.stats().workers[0].kept_bytes == 24
    assert worker.refused(span(1, 6), sequence_id=7, kept=6).reason is RefusalReason.NO_ROOM
    worker.release(other, ABORTED)
    live = worker.start([*span(1, 6), 7], sequence_id=7, kept=6)
    assert worker.world.manager.stats().workers[0].kept_bytes == 0
    worker.prefill(live)
    worker.release(live)
    assert worker.world.tokens_cached([*span(1, 6), 7]) == 6


def test_a_preempted_sequence_is_kept_with_what_it_said() -> None:
    worker = make(8, 2)
    live = worker.start(span(1, 4))
    worker.prefill(live)
    worker.decode(live, [5, 6])
    worker.release(live, PREEMPTED)
    assert worker.kept[live.id] == 6
    again = worker.start([*span(1, 6), 7], sequence_id=live.id, kept=6)
    assert again.grant.usable_tokens == 6
    worker.prefill(again)
    worker.check_reads(again)


@pytest.mark.parametrize("kept", [5, 7])
def test_more_than_was_kept_is_to_be_sent_again(kept: int) -> None:
    worker, _ = full_house()
    worker.refused(span(1, 4), sequence_id=7)
    answer = worker.submit(span(1, 8), sequence_id=7, kept=kept)
    assert isinstance(answer, Refusal) and answer.reason is RefusalReason.RESEND


def test_a_resend_bars_nobody() -> None:
    worker = make(8, 2)
    acquires = [
        Acquire(SequenceId(1), NS, b"", kept_tokens=4),
        Acquire(SequenceId(2), NS, pack(span(1, 4))),
    ]
    reply = worker.step(acquires=acquires)
    assert [(r.sequence_id, r.reason) for r in reply.refusals] == [(1, RefusalReason.RESEND)]
    assert [grant.sequence_id for grant in reply.grants] == [2]


def test_a_sequence_that_gives_up_waiting_is_released() -> None:
    worker, _ = full_house()
    worker.refused(span(1, 6), sequence_id=7)
    worker.step(releases=[Release(SequenceId(7), ABORTED)])
    assert worker.world.manager.stats().workers[0].kept_bytes == 0
    (refusal,) = worker.raw_step(releases=[Release(SequenceId(7), ABORTED)]).refusals
    assert refusal.field == "step.releases[0].sequence_id"


def test_kept_prompts_are_bounded_and_the_longest_unnamed_goes_first() -> None:
    worker, _ = full_house(max_kept_bytes=40)
    for sequence in (11, 12):
        worker.refused(span(1, 5), sequence_id=sequence)
    worker.refused(span(1, 5), sequence_id=11, kept=5)  # named again, so 12 goes before it
    worker.refused(span(1, 5), sequence_id=13)
    assert worker.world.manager.stats().workers[0].kept_bytes == 40
    answers = [worker.refused(span(1, 5), sequence_id=sequence, kept=5).reason for sequence in (11, 12, 13)]
    assert answers == [RefusalReason.NO_ROOM, RefusalReason.RESEND, RefusalReason.NO_ROOM]
    worker.refused(span(1, 8), sequence_id=14)
    assert worker.world.manager.stats().workers[0].kept_bytes == 32
    nothing, _ = full_house(max_kept_bytes=0)
    nothing.refused(span(1, 5), sequence_id=11)
    assert nothing.world.manager.stats().workers[0].kept_bytes == 0


def test_what_never_fits_is_not_kept() -> None:
    worker, _ = full_house()
    assert worker.refused(span(1, 20), sequence_id=7).reason is RefusalReason.NEVER_FITS
    assert worker.world.manager.stats().workers[0].kept_bytes == 0


def test_a_new_generation_keeps_no_prompt() -> None:
    worker, _ = full_house()
    worker.refused(span(1, 6), sequence_id=7)
    worker.generation = 0
    worker.hello()
    answer = worker.submit(span(1, 6), sequence_id=7, kept=6)
    assert isinstance(answer, Refusal) and answer.reason is RefusalReason.RESEND


# Faults of ours.


@python_only
def test_a_fault_in_the_middle_of_a_step_ends_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the step is applied: nothing may go on from there, so the worker begins anew and adopts."""
    world = World(watch=True, spill=SpillPolicy.WRITE_THROUGH, fetch=FetchPolicy.ALWAYS)
    worker = FakeWorker(world, ALL_KINDS, 2, host_tier=HostTierKind.SHARED, host_tier_id="redis")
    worker.run(span(1, 9))
    live, other = worker.start(span(1, 12)), worker.start(span(20, 25))
    for sequence in (live, other):
        worker.launch(sequence)
    world.tick()
    merge, calls = WindowGroup.merge, iter([False, True])

    def breaks(*arguments: Any) -> None:
        if next(calls, False):
            raise KeyError("scripted")
        merge(*arguments)

    monkeypatch.setattr(WindowGroup, "merge", breaks)
    with pytest.raises(KeyError):
        world.manager.step(
            worker.id,
            worker.next_step(publishes=[worker.publish_of(live), worker.publish_of(other)]),
            world.now_ms,
        )
    assert not world.manager.stats().workers
    worker.connected = False
    worker.spills.clear()
    world.settle()
    welcome = worker.hello()
    assert not worker.goes_on and welcome.last_step_id == 0
    oracle = Oracle(worker)
    worker.adopt_all([live, other])
    for sequence in (live, other):
        worker.decode(sequence, [7, 8])
        worker.release(sequence)
    worker.spill_all()
    oracle.check()
    assert [spare(worker, group) for group in range(3)] == [24, 24, 16]


# Models.


def test_a_worker_is_of_one_model() -> None:
    world = World()
    worker = FakeWorker(world, [full(8)], 2)
    worker.model = "mine"
    worker.restart("i1")
    mine, other = Namespace("mine"), Namespace("other")
    assert world.manager.stats().workers[0].model == "mine", "before any request"
    assert world.manager.match(mine, pack([1, 2, 3])) and not world.manager.match(other, pack([1, 2, 3]))
    (refusal,) = worker.raw_step(acquires=[Acquire(SequenceId(1), other, pack([1, 2, 3]))]).refusals
    assert refusal.field == "step.acquires[0].namespace.model"
    worker.start([1, 2, 3], mine)
