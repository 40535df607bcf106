"""A session that breaks and comes back: steps are repeated or void, sequences go on, are adopted, or queue again."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from tests.worker_service.scheduler_machine import VOCAB, Machine, full_group, window_group
from worker_service.core.inbox import UnaskedReply
from worker_service.core.ports import Refusal, RefusalReason, SequenceId, StepReply, Welcome
from worker_service.core.scheduler import SchedulerConfig

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


@pytest.mark.parametrize("reply_was_lost", [False, True])
def test_known_sequences_repeat_the_unanswered_step(reply_was_lost: bool) -> None:
    driven = machine()
    in_all_states(driven)
    driven.lose_session(reply_was_lost=reply_was_lost)
    assert driven.scheduler.unanswered is None
    driven.start()
    driven.run()
    driven.check_over()
    assert driven.manager.epoch == "epoch-1"


def test_live_sequences_name_every_lease_that_may_exist() -> None:
    driven = machine()
    decodes, prefills, _ = in_all_states(driven)
    assert set(driven.scheduler.live_sequences()) == {decodes, prefills}
    driven.land()
    driven.abort(decodes)
    step = driven.scheduler.next_step()
    assert step is not None
    assert [release.sequence_id for release in step.releases] == [decodes]
    acquired = {acquire.sequence_id for acquire in step.acquires}
    assert set(driven.scheduler.live_sequences()) == {decodes, prefills} | acquired


def test_restarted_manager_adopts_what_was_computed() -> None:
    driven = machine()
    decodes, prefills, waits = in_all_states(driven)
    driven.exchange()
    driven.land()
    computed = {i: driven.manager.leases[i].published_pages for i in (decodes, prefills)}
    driven.restart_manager()
    assert set(driven.manager.leases) == {decodes, prefills}
    assert all(driven.manager.leases[i].published_pages >= computed[i] for i in computed)
    chunks_before = sum(driven.prefilled[prefills])
    driven.start()
    driven.run()
    driven.check_over()
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
    driven.run()
    driven.check_over()


def test_unanswered_step_is_void_for_a_new_manager() -> None:
    driven = machine()
    in_all_states(driven)
    step = driven.scheduler.next_step()
    assert step is not None
    driven.land()
    driven.restart_manager()
    assert driven.scheduler.unanswered is None
    following = driven.scheduler.next_step()
    assert following is None or following.step_id == 1
    if following is not None:
        driven.apply(driven.manager.step(following))
    driven.start()
    driven.run()
    driven.check_over()


def test_refused_adoption_queues_again() -> None:
    driven = machine()
    decodes = driven.ask([1] * 6, max_tokens=10)
    for _ in range(4):
        driven.turn()
    driven.land()
    driven.manager = driven.new_manager(None)
    readmission = driven.scheduler.readmit(Welcome("another", frozenset(), 0))
    assert [adopt.sequence_id for adopt in readmission.adopts] == [decodes]
    driven.scheduler.apply_adopt(decodes, Refusal(decodes, RefusalReason.NO_ROOM, "taken"))
    driven.start()
    driven.run()
    driven.check_over()


@pytest.mark.parametrize("is_granted", [True, False])
def test_abort_while_the_adoption_is_on_its_way(is_granted: bool) -> None:
    driven = machine()
    decodes = driven.ask([1] * 6, max_tokens=10)
    for _ in range(4):
        driven.turn()
    driven.land()
    driven.manager = driven.new_manager(None)
    (adopt,) = driven.scheduler.readmit(Welcome("another", frozenset(), 0)).adopts
    driven.abort(decodes)
    answer = driven.manager.adopt(adopt) if is_granted else Refusal(decodes, RefusalReason.NO_ROOM, "taken")
    driven.scheduler.apply_adopt(decodes, answer)
    driven.run()
    driven.check_over()


def test_finished_sequence_is_forgotten_by_a_new_manager() -> None:
    """Its release would name a lease that does not exist, and a step is refused whole."""
    driven = machine()
    driven.ask([1] * 6)
    driven.turn()
    driven.land()
    driven.restart_manager()
    assert driven.scheduler.next_step() is None
    driven.check_over()


def test_adopted_window_pages_are_those_that_are_still_read() -> None:
    """The others were published and left behind: they may be another sequence's by now."""
    driven = machine(groups=(full_group(40), window_group(20, 6)))
    driven.ask([1] * 50, max_tokens=5)
    for _ in range(3):
        driven.turn()
    driven.land()
    (adopt,) = driven.scheduler.readmit(Welcome("another", frozenset(), 0)).adopts
    assert adopt.computed_tokens == 48
    full, window = (array("I", pages.page_ids).tolist() for pages in adopt.tables)
    assert all(full[:12])
    # The five tokens before 48 lie in pages 10 and 11.
    assert window[:10] == [0] * 10
    assert all(window[10:12])


def test_lease_that_lost_its_place_ends_and_the_sequence_queues() -> None:
    """The manager knows it, but stands at another step: what was said in between cannot be told."""
    driven = machine()
    decodes = driven.ask([1] * 6, max_tokens=10)
    for _ in range(3):
        driven.turn()
    driven.land()
    driven.abort(driven.ask([2] * 5))
    driven.ask([3] * 5)
    assert driven.scheduler.next_step() is not None
    driven.manager.last_step_id += 7
    known = frozenset(driven.manager.leases)
    readmission = driven.scheduler.readmit(Welcome(driven.manager.epoch, known, driven.manager.last_step_id))
    assert readmission == (None, ())
    driven.run()
    driven.check_over()
    assert driven.clients[decodes].usage is not None


def test_replies_that_answer_something_else_are_named() -> None:
    driven = machine()
    with pytest.raises(UnaskedReply, match="step 4"):
        driven.scheduler.apply(StepReply(4))
    driven.ask([1] * 5)
    step = driven.scheduler.next_step()
    assert step is not None
    stranger = Refusal(SequenceId(99), RefusalReason.NO_ROOM, "")
    with pytest.raises(UnaskedReply, match="99"):
        driven.scheduler.apply(StepReply(step.step_id, refusals=(stranger,)))


def test_answer_that_is_missing_grants_nothing() -> None:
    driven = machine()
    driven.ask([1] * 5)
    step = driven.scheduler.next_step()
    assert step is not None
    driven.scheduler.apply(StepReply(step.step_id))
    assert driven.scheduler.num_waiting == 1
    assert driven.scheduler.next_launch() is None
