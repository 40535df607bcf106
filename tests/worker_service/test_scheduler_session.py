"""A session that breaks and comes back: steps are repeated or void, sequences go on, are adopted, or queue again."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from session.messages import Adopt, Refusal, Step, StepReply
from session.words import RefusalReason, SequenceId
from tests.worker_service.audited_manager import LIMITS
from tests.worker_service.scheduler_machine import VOCAB, Machine, full_group, window_group
from worker_service.core.errors import LostPlace, UnaskedReply
from worker_service.core.scheduler_config import SchedulerConfig

CONFIG = SchedulerConfig(
    page_tokens=4, groups=(full_group(40),), max_model_len=100, vocab_size=VOCAB, token_budget=16, max_num_seqs=8
)


def machine(**changes: object) -> Machine:
    return Machine(replace(CONFIG, **changes))  # type: ignore[arg-type]


def in_all_states(driven: Machine) -> list[SequenceId]:
    """One decodes, one is in the middle of its prompt, one waits."""
    decodes = driven.ask([1] * 6, max_tokens=30)
    driven.turn()
    prefills = driven.ask([2] * 50, max_tokens=3)
    driven.turn()
    driven.turn()
    waits = driven.ask([3] * 20, max_tokens=3)
    return [decodes, prefills, waits]


def decoding(driven: Machine, count: int) -> list[SequenceId]:
    """Sequences that have all computed something."""
    ids = [driven.ask([number] * 6, max_tokens=10) for number in range(count)]
    for _ in range(4):
        driven.turn()
    driven.end_launch()
    return ids


def adopt_step(driven: Machine) -> Step:
    step = driven.scheduler.next_step()
    assert step is not None
    assert step.adopts
    assert step == Step(step.step_id, adopts=step.adopts)
    return step


def adopt_ids(step: Step) -> list[SequenceId]:
    return [adopt.sequence_id for adopt in step.adopts]


def finish(driven: Machine) -> None:
    driven.start()
    driven.run()
    driven.check_over()


# -- the same state --


@pytest.mark.parametrize("reply_was_lost", [False, True])
def test_the_same_state_gets_the_unanswered_step_again(reply_was_lost: bool) -> None:
    driven = machine()
    in_all_states(driven)
    driven.lose_session(reply_was_lost=reply_was_lost)
    assert driven.scheduler.unanswered is None
    finish(driven)
    assert driven.manager.generation == 1


def test_a_step_id_out_of_place_begins_anew() -> None:
    """The service says that it is the same state, but stands where this worker never was."""
    driven = machine()
    (decodes,) = decoding(driven, 1)
    driven.abort(driven.ask([2] * 5))
    driven.ask([3] * 5)
    assert driven.scheduler.next_step() is not None
    driven.manager.last_step_id += 7
    with pytest.raises(LostPlace, match="step"):
        driven.say_hello()
    assert driven.scheduler.generation == 0
    driven.say_hello()
    assert driven.manager.generation == 2
    assert adopt_ids(adopt_step(driven)) == [decodes]
    assert driven.say_hello() is not None
    driven.apply(driven.manager.step(driven.say_hello()))  # type: ignore[arg-type]
    finish(driven)


@pytest.mark.parametrize("generation_moves", [False, True])
def test_the_same_epoch_is_not_the_same_state(generation_moves: bool) -> None:
    """Away for longer than the grace period with the first step unanswered: its releases name nobody any more."""
    driven = machine()
    in_all_states(driven)
    assert driven.scheduler.next_step() is not None
    driven.end_launch()
    if generation_moves:
        driven.manager.forget()
        assert driven.say_hello() is None
        driven.adopt_all()
    else:
        driven.manager.last_step_id = 0
        with pytest.raises(LostPlace):
            driven.say_hello()
        driven.say_hello()
    finish(driven)


# -- another state --


def test_restarted_manager_adopts_what_was_computed() -> None:
    driven = machine()
    decodes, prefills, waits = in_all_states(driven)
    driven.exchange()
    driven.end_launch()
    computed = {i: driven.manager.leases[i].published_pages for i in (decodes, prefills)}
    driven.restart_manager()
    assert driven.scheduler.num_adopting == 2
    assert driven.scheduler.next_launch() is None
    driven.adopt_all()
    assert set(driven.manager.leases) == {decodes, prefills}
    assert all(driven.manager.leases[i].published_pages >= computed[i] for i in computed)
    chunks_before = sum(driven.prefilled[prefills])
    finish(driven)
    assert sum(driven.prefilled[prefills]) == 50 > chunks_before  # nothing of it was computed twice
    assert driven.clients[waits].usage is not None


def test_what_computed_nothing_queues_again() -> None:
    driven = machine()
    first = driven.ask([1] * 20)
    driven.exchange()
    assert first in driven.manager.leases
    driven.restart_manager()
    assert first not in driven.manager.leases
    assert driven.scheduler.num_waiting == 1
    finish(driven)


def test_unanswered_step_is_void_for_a_new_manager() -> None:
    driven = machine()
    in_all_states(driven)
    assert driven.scheduler.next_step() is not None
    driven.end_launch()
    driven.restart_manager()
    assert driven.scheduler.unanswered is None
    assert adopt_step(driven).step_id == 1
    driven.restart_manager()
    finish(driven)


def test_finished_sequence_is_forgotten_by_a_new_manager() -> None:
    driven = machine()
    driven.ask([1] * 6)
    driven.turn()
    driven.end_launch()
    driven.restart_manager()
    driven.scheduler.withhold_inventory()
    assert driven.scheduler.next_step() is None
    driven.check_over()


# -- adoption --


def test_adopts_go_out_in_slices_and_alone() -> None:
    driven = machine()
    ids = decoding(driven, 6)
    driven.restart_manager(LIMITS._replace(max_adopt_pages=7))  # each has 2 or 3 pages
    waits = driven.ask([9] * 5)
    seen = []
    while driven.scheduler.num_adopting:
        step = adopt_step(driven)
        seen += adopt_ids(step)
        assert sum(len(pages.page_ids) // 4 for adopt in step.adopts for pages in adopt.tables) <= 7
        driven.apply(driven.manager.step(step))
    assert seen == ids
    assert driven.manager.last_step_id == 3
    finish(driven)
    assert driven.clients[waits].usage is not None


@pytest.mark.parametrize("limit", [{"max_step_items": 1}, {"max_adopt_pages": 1}, {"max_message_bytes": 30_000}])
def test_a_sequence_beyond_the_slice_goes_alone(limit: dict[str, int]) -> None:
    driven = machine()
    ids = decoding(driven, 3)
    driven.restart_manager(LIMITS._replace(**limit))
    driven.adopt_all()
    assert driven.manager.adopted == ids
    assert driven.manager.last_step_id == (3 if "max_message_bytes" not in limit else 1)
    finish(driven)


@pytest.mark.parametrize("reply_was_lost", [False, True])
@pytest.mark.parametrize("number", range(3))
def test_a_break_between_adopts_repeats_one_and_goes_on(number: int, reply_was_lost: bool) -> None:
    driven = machine()
    ids = decoding(driven, 3)
    driven.restart_manager(LIMITS._replace(max_step_items=1))
    for _ in range(number):
        driven.exchange()
    step = adopt_step(driven)
    if reply_was_lost:
        driven.manager.step(step)
    assert driven.say_hello() is step
    assert driven.say_hello() is step  # and once more, before it was repeated
    driven.apply(driven.manager.step(step))
    driven.adopt_all()
    assert driven.manager.adopted == ids
    finish(driven)


def test_a_lost_reply_to_an_adopt_leaves_no_duplicate_page_in_a_table() -> None:
    """Two had computed the same first page; one copy is left, and the worker has to learn which."""
    driven = machine()
    first = driven.ask([1, 2, 3, 4, 10, 11, 12, 13, 14], max_tokens=20)
    second = driven.ask([1, 2, 3, 4, 20, 21, 22, 23, 24], max_tokens=20)
    driven.exchange()
    for _ in range(2):
        driven.start()
        driven.end_launch()
    driven.restart_manager()
    step = adopt_step(driven)
    assert adopt_ids(step) == [first, second]
    assert step.adopts[0].tables[0].page_ids[:4] != step.adopts[1].tables[0].page_ids[:4]
    driven.manager.step(step)  # applied; its reply never arrives
    assert driven.say_hello() is step
    driven.apply(driven.manager.step(step))
    driven.ask(list(range(25, 49)) + [3] * 20, max_tokens=2)  # takes the page that went free
    finish(driven)


def test_two_breaks_in_a_row_leave_no_lease_behind() -> None:
    driven = machine()
    decoding(driven, 2)
    driven.restart_manager(LIMITS._replace(max_step_items=1))
    driven.exchange()
    driven.manager.forget()  # another state again, in the middle of the adoption
    driven.say_hello()
    driven.say_hello()
    driven.adopt_all()
    assert len(driven.manager.leases) == 2
    finish(driven)


def test_a_manager_that_restarts_between_adopts_gets_all_of_them() -> None:
    driven = machine()
    ids = decoding(driven, 3)
    driven.restart_manager(LIMITS._replace(max_step_items=1))
    driven.exchange()
    driven.start()  # the first one runs on meanwhile
    driven.end_launch()
    driven.restart_manager()
    driven.adopt_all()
    assert set(driven.manager.leases) == set(ids)
    finish(driven)


@pytest.mark.parametrize("reason", [RefusalReason.NO_ROOM, RefusalReason.INVALID])
def test_a_refused_adopt_queues_again_or_fails_alone(reason: RefusalReason) -> None:
    driven = machine()
    first, second = decoding(driven, 2)
    driven.restart_manager()
    step = adopt_step(driven)
    driven.manager.step(step._replace(adopts=step.adopts[1:]))
    granted = driven.manager.reply.grants
    refusal = Refusal(first, reason, "taken", "step.adopts[0].tokens")
    driven.apply(StepReply(step.step_id, grants=granted, refusals=(refusal,)))
    finish(driven)
    if reason is RefusalReason.INVALID:
        assert driven.clients[first].failed == "tokens: taken"
    else:
        usage = driven.clients[first].usage
        assert usage is not None
        assert usage.num_preemptions == 1
    assert driven.clients[second].usage is not None


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("is_granted", [True, False])
def test_abort_while_the_adoption_is_on_its_way(is_sent: bool, is_granted: bool) -> None:
    driven = machine()
    decodes, other = decoding(driven, 2)
    driven.restart_manager()
    step = adopt_step(driven) if is_sent else None
    driven.abort(decodes)
    if step is None:
        step = adopt_step(driven)
        assert adopt_ids(step) == [other]
    if is_granted or not is_sent:
        driven.apply(driven.manager.step(step))
    else:
        driven.manager.step(step._replace(adopts=step.adopts[1:]))
        refusal = Refusal(decodes, RefusalReason.NO_ROOM, "taken")
        driven.apply(StepReply(step.step_id, grants=driven.manager.reply.grants, refusals=(refusal,)))
    finish(driven)


def test_all_that_wait_for_adoption_are_aborted() -> None:
    driven = machine()
    for sequence_id in decoding(driven, 2):
        driven.abort(sequence_id)
    driven.restart_manager()
    driven.scheduler.withhold_inventory()
    assert driven.scheduler.next_step() is None
    driven.check_over()


def test_adopted_window_pages_are_those_that_are_still_read() -> None:
    """The others were published and left behind: they may be another sequence's by now."""
    driven = machine(groups=(full_group(40), window_group(20, 6)))
    driven.ask([1] * 50, max_tokens=5)
    for _ in range(3):
        driven.turn()
    driven.end_launch()
    driven.restart_manager()
    (adopt,) = adopt_step(driven).adopts
    assert isinstance(adopt, Adopt)
    assert adopt.computed_tokens == 48
    full, window = (array("I", pages.page_ids).tolist() for pages in adopt.tables)
    assert all(full[:12])
    # The five tokens before 48 lie in pages 10 and 11.
    assert window[:10] == [0] * 10
    assert all(window[10:12])


# -- a step that no session survives --


def test_a_rejected_step_is_void_and_its_requests_ask_one_by_one() -> None:
    driven = machine()
    decodes = driven.ask([1] * 6, 30)
    driven.turn()
    driven.end_launch()
    culprit, innocent = driven.ask([2] * 5), driven.ask([3] * 5)
    step = driven.scheduler.next_step()
    assert step is not None
    assert len(step.acquires) == 2
    assert driven.scheduler.reject_step() == ()
    assert driven.scheduler.generation == 0
    driven.say_hello()
    driven.adopt_all()
    step = driven.scheduler.next_step()
    assert step is not None
    assert [acquire.sequence_id for acquire in step.acquires] == [culprit]
    (failed,) = driven.scheduler.reject_step()
    assert failed.sequence_id == culprit
    driven.give_up([failed])
    driven.say_hello()
    finish(driven)
    assert driven.clients[decodes].usage is not None
    assert driven.clients[innocent].usage is not None


# -- replies --


def test_replies_that_answer_something_else_are_named_and_change_nothing() -> None:
    driven = machine()
    with pytest.raises(UnaskedReply, match="step 4"):
        driven.scheduler.apply(StepReply(4))
    driven.ask([1] * 5)
    step = driven.scheduler.next_step()
    assert step is not None
    stranger = Refusal(SequenceId(99), RefusalReason.NO_ROOM, "")
    reply = driven.manager.step(step)
    for wrong in (
        StepReply(step.step_id, refusals=(stranger,)),
        reply._replace(grants=reply.grants * 2),
        reply._replace(grants=(*reply.grants, reply.grants[0]._replace(sequence_id=SequenceId(99)))),
    ):
        with pytest.raises(UnaskedReply):
            driven.scheduler.apply(wrong)
    driven.apply(reply)
    finish(driven)


def test_answer_that_is_missing_grants_nothing() -> None:
    driven = machine()
    driven.ask([1] * 5)
    step = driven.scheduler.next_step()
    assert step is not None
    driven.scheduler.apply(StepReply(step.step_id))
    assert driven.scheduler.num_waiting == 1
    assert driven.scheduler.next_launch() is None
