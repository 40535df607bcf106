"""Refusals: who waits, who gives way, who asks again and when. Pools are counted out so that each case is forced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache_service.core.verbs.stepping import acknowledge
from session.messages import Ack, Step
from session.words import SequenceId, TransferStatus
from tests.worker_service.scheduler_machine import VOCAB, Machine, full_group
from worker_service.core.scheduler_config import SchedulerConfig

CONFIG = SchedulerConfig(
    page_tokens=4, groups=(full_group(8),), max_model_len=32, vocab_size=VOCAB, token_budget=64, max_num_seqs=8
)


def machine(num_pages: int, *, host: bool = False, **changes: object) -> Machine:
    return Machine(replace(CONFIG, groups=(full_group(num_pages),), **changes), host=host)  # type: ignore[arg-type]


def prompt(length: int, start: int) -> list[int]:
    return [start] * length


def steps_of(driven: Machine, num_turns: int) -> list[Step]:
    """The steps of the coming turns."""
    taken: list[Step] = []
    answer = driven.manager.step

    def noting(step: Step):  # type: ignore[no-untyped-def]
        taken.append(step)
        return answer(step)

    driven.manager.step = noting  # type: ignore[method-assign]
    for _ in range(num_turns):
        driven.turn()
    driven.manager.step = answer  # type: ignore[method-assign]
    return taken


def test_youngest_gives_way_to_the_oldest() -> None:
    """Two sequences of a pool that holds one whole: the older is never preempted, the younger finishes after it."""
    driven = machine(8)
    older = driven.ask(prompt(12, 1), max_tokens=18)
    younger = driven.ask(prompt(12, 2), max_tokens=18)
    driven.run()
    driven.check_over()
    usages = {sequence_id: client.usage for sequence_id, client in driven.clients.items()}
    assert usages[older] is not None and usages[younger] is not None
    assert usages[older].num_preemptions == 0
    assert usages[younger].num_preemptions == 1
    # It asks again when the older one has left: the pages that it gave were taken for that one.
    assert driven.manager.num_acquires[younger] == 2


@pytest.mark.parametrize("ahead", [0, 4, 16])
def test_pages_asked_for_in_time_preempt_nobody(ahead: int) -> None:
    """Two sequences that just fit: what one cannot have ahead, the other needs. Nobody starves, and nobody goes."""
    driven = machine(8, decode_ahead_tokens=ahead)
    asked = [driven.ask(prompt(8, number), max_tokens=8) for number in (1, 2)]
    steps = steps_of(driven, 30)
    driven.run()
    driven.check_over()
    usages = [driven.clients[sequence_id].usage for sequence_id in asked]
    assert [usage and usage.num_preemptions for usage in usages] == [0, 0]
    lengths = [extend.num_tokens for step in steps for extend in step.extends]
    assert max(lengths) <= 16
    if ahead:
        assert lengths[0] == min(9 + ahead, 16), "nothing was asked for ahead"


def test_a_refusal_of_pages_ahead_fails_nobody_and_pauses_such_asks() -> None:
    """A pool that never holds what is asked for ahead: NEVER_FITS concerns the ask, not the request."""
    driven = machine(6, decode_ahead_tokens=64)
    first, second = driven.ask(prompt(8, 1), max_tokens=14), driven.ask(prompt(8, 2), max_tokens=2)
    steps = steps_of(driven, 40)
    driven.run()
    driven.check_over()
    assert driven.clients[first].usage is not None and driven.clients[second].usage is not None
    lengths = [extend.num_tokens for step in steps for extend in step.extends]
    assert lengths and lengths != sorted(lengths, reverse=True), "it asked for less after the refusal"


def test_preempted_request_prefills_prompt_and_what_it_generated() -> None:
    """Case 19, R34: the tail that was not published is computed again, and the answer is the same (check_over)."""
    driven = machine(8)
    driven.ask(prompt(12, 1), max_tokens=18)
    younger = driven.ask(prompt(12, 2), max_tokens=18)
    while not any(sequence.num_preemptions for sequence in driven.scheduler._queues.unfinished.values()):
        driven.turn()
    generated = len(driven.clients[younger].tokens)
    assert generated > 0
    driven.prefilled.clear()
    driven.run()
    driven.check_over()
    usage = driven.clients[younger].usage
    assert usage is not None
    assert 1 <= sum(driven.prefilled[younger]) <= 12 + generated
    assert usage.computed_tokens == 12 + sum(driven.prefilled[younger])


def test_refused_extend_sits_out_one_launch_and_asks_first() -> None:
    """The younger needs a page first and is refused; while it sits out, the older one needs one and comes second."""
    driven = machine(6)
    older = driven.ask(prompt(10, 1), max_tokens=10)
    younger = driven.ask(prompt(11, 2), max_tokens=10)
    steps = steps_of(driven, 8)
    extends = [[extend.sequence_id for extend in step.extends] for step in steps if step.extends]
    assert extends[:3] == [[younger], [younger, older], [older]]
    assert driven.launches[3].rows[0].sequence_id == older
    assert driven.launches[3].batch.num_seqs == 1
    driven.run()
    driven.check_over()


def test_refused_acquire_is_sent_again_only_after_something_was_freed() -> None:
    driven = machine(4)
    driven.ask(prompt(12, 1), max_tokens=4)
    blocked = driven.ask(prompt(12, 2), max_tokens=2)
    driven.run()
    driven.check_over()
    assert driven.manager.num_acquires[blocked] == 2  # with the first, and after the first had left


def test_nobody_behind_a_refused_request_goes_first() -> None:
    """A stream of small requests cannot starve a large one."""
    driven = machine(5)
    driven.ask(prompt(8, 1), max_tokens=8)
    large = driven.ask(prompt(16, 2), max_tokens=2)
    small = driven.ask(prompt(2, 3), max_tokens=2)
    driven.run()
    driven.check_over()
    assert driven.manager.order.index(large) < driven.manager.order.index(small)


def test_aborting_the_refused_head_lets_the_next_one_try() -> None:
    driven = machine(5)
    driven.ask(prompt(8, 1), max_tokens=8)
    large = driven.ask(prompt(16, 2), max_tokens=2)
    small = driven.ask(prompt(2, 3), max_tokens=2)
    driven.turn()
    driven.abort(large)
    driven.turn()
    driven.turn()
    assert small in driven.manager.order


def blocked_by_spills(driven: Machine) -> SequenceId:
    """A request that is refused, since the tickets of spills that are not acknowledged yet pin the pages it needs."""
    driven.mover.is_stalled = True
    driven.ask(prompt(13, 1))
    driven.run()
    assert driven.mover.spills
    blocked = driven.ask(prompt(12, 2), max_tokens=2)
    driven.run()
    assert driven.manager.num_acquires[blocked] == 1
    return blocked


def test_an_acknowledged_ticket_frees() -> None:
    """A spill ticket pins pages: its ack is news to a refused request."""
    driven = machine(4, host=True)
    blocked = blocked_by_spills(driven)
    driven.run()
    assert driven.manager.num_acquires[blocked] == 1  # nothing tells it
    driven.mover.is_stalled = False
    driven.run()
    driven.check_over()


def test_an_idle_engine_may_ask_again() -> None:
    """What frees pages need not come from this worker's own steps."""
    driven = machine(4, host=True)
    blocked_by_spills(driven)
    for transfer in driven.mover.spills:
        acknowledge(driven.manager.cache, Ack(transfer.ticket, 0, TransferStatus.FAILED), driven.manager.now_ms)
    driven.mover.spills.clear()
    driven.mover.is_stalled = False
    driven.run()
    assert driven.scheduler.num_waiting == 1
    driven.scheduler.retry_refused()
    driven.run()
    driven.check_over()


def test_reserve_is_for_others_only() -> None:
    """Alone, the longest prompt fits although the reserve would forbid it; beside a running one it waits."""
    driven = machine(8, reserve_pages=2)
    alone = driven.ask(prompt(31, 1))
    driven.run()
    assert driven.clients[alone].usage is not None
    driven.ask(prompt(4, 2), max_tokens=12)
    beside = driven.ask(prompt(24, 3), max_tokens=2)
    for _ in range(3):
        driven.turn()
    assert beside not in driven.manager.order
    driven.run()
    driven.check_over()


def test_a_reserve_that_the_pool_has_not_fails_nobody() -> None:
    """Six pages, of which the prompt takes five: beside a running one it waits, with a reserve of two as well."""
    driven = machine(6, reserve_pages=2)
    driven.ask(prompt(9, 1), max_tokens=6)
    driven.turn()
    long = driven.ask(prompt(17, 2), max_tokens=5)
    driven.run()
    driven.check_over()
    assert not driven.clients[long].failed


def test_request_that_never_fits_fails_with_its_reason() -> None:
    driven = machine(4)
    never = driven.ask(prompt(20, 1))
    fits = driven.ask(prompt(8, 2))
    driven.run()
    assert driven.clients[never].failed == "prompt: 20 tokens take 5 pages; group full has 4"
    assert driven.clients[fits].usage is not None
    assert driven.scheduler.num_unfinished == 0


def test_token_in_flight_is_kept_when_its_sequence_is_preempted() -> None:
    """The launch ends before the lease does, so nothing that was sampled is sampled twice."""
    driven = machine(6)
    driven.ask(prompt(12, 1), max_tokens=10)
    younger = driven.ask(prompt(9, 2), max_tokens=10)
    num_seen = 0
    for _ in range(200):
        before = driven.launch
        driven.exchange()
        leaving = [d.sequence for d in driven.scheduler._queues.departures.values()]
        in_flight = [row.sequence_id for row in before.rows] if before is not None else []
        count = len(driven.clients[younger].tokens)
        driven.end_launch()
        for sequence in leaving:
            if sequence.sequence_id in in_flight:
                num_seen += 1
                assert len(driven.clients[younger].tokens) == count + 1
        driven.start()
    assert num_seen
    driven.run()
    driven.check_over()


def test_abort_while_the_acquire_is_on_its_way() -> None:
    """The grant arrives for a request that is gone: its lease ends with the next step."""
    driven = machine(8)
    sequence_id = driven.ask(prompt(12, 1))
    step = driven.scheduler.next_step()
    assert step is not None
    driven.abort(sequence_id)
    driven.apply(driven.manager.step(step))
    assert driven.manager.leases
    driven.run()
    driven.check_over()


def fetching(*, beside: bool = False) -> tuple[Machine, SequenceId]:
    """A request whose prefix is in the host tier, its two fetches under way; perhaps beside one that decodes."""
    driven = machine(8, host=True)
    driven.ask(prompt(20, 1))
    driven.run()
    driven.ask([7, *prompt(28, 2)], max_tokens=3)
    driven.run()
    if beside:
        driven.ask(prompt(2, 3), max_tokens=8)
        driven.turn()
        driven.turn()
        driven.end_launch()
    sequence_id = driven.ask(prompt(20, 1))
    driven.exchange()
    assert len(driven.mover.fetches) == len(driven.manager.cache.transfers.fetches) == 2
    return driven, sequence_id


def test_abort_while_fetching_waits_for_the_ack() -> None:
    driven, sequence_id = fetching()
    driven.abort(sequence_id)
    driven.exchange()
    assert not driven.manager.leases
    assert driven.manager.cache.transfers.fetches
    driven.move_pages()
    driven.run()
    driven.check_over()


def test_ack_of_a_departing_sequence_follows_its_release() -> None:
    """In one step the ack would come first, and the manager would plan for a sequence that is about to go."""
    driven, sequence_id = fetching()
    driven.move_pages()
    driven.abort(sequence_id)
    first, second = driven.scheduler.next_step(), None
    assert first is not None
    assert (len(first.acks), len(first.releases)) == (0, 1)
    driven.apply(driven.manager.step(first))
    second = driven.scheduler.next_step()
    assert second is not None
    assert len(second.acks) == 2
    driven.apply(driven.manager.step(second))
    driven.run()
    driven.check_over()


def test_abort_while_the_ack_is_on_its_way() -> None:
    driven, sequence_id = fetching()
    driven.move_pages()
    step = driven.scheduler.next_step()
    assert step is not None and step.acks
    driven.abort(sequence_id)
    driven.apply(driven.manager.step(step))
    driven.run()
    driven.check_over()


def test_fetch_that_misses_is_planned_again() -> None:
    driven, sequence_id = fetching()
    last = driven.mover.fetches[-1]
    ((key, _, _),) = driven.mover.parts(last, last.num_pages - 1)
    del driven.mover.store[key]
    driven.run()
    driven.check_over()
    usage = driven.clients[sequence_id].usage
    assert usage is not None
    assert usage.cached_tokens + usage.fetched_tokens + usage.computed_tokens == 20
    assert usage.fetched_tokens == 12


def test_refused_replan_asks_again_at_once() -> None:
    """Its lease has ended, so something was freed; and the step's releases came after its acks."""
    driven, sequence_id = fetching(beside=True)
    driven.manager.refuse_acquires_and_replans()
    driven.move_pages()
    steps = steps_of(driven, 2)
    assert [len(step.acks) for step in steps] == [2, 0]
    assert [acquire.sequence_id for acquire in steps[1].acquires] == [sequence_id]
    driven.run()
    driven.check_over()
    assert driven.clients[sequence_id].usage is not None


def test_abort_while_a_replan_is_refused_releases_nothing() -> None:
    """The lease is gone already; a release of it would be refused, with the whole step."""
    driven, sequence_id = fetching(beside=True)
    driven.manager.refuse_acquires_and_replans()
    driven.move_pages()
    step = driven.scheduler.next_step()
    assert step is not None and step.acks
    driven.abort(sequence_id)
    driven.apply(driven.manager.step(step))
    driven.run()
    driven.check_over()


@pytest.mark.parametrize("reply_was_lost", [False, True])
def test_session_lost_while_a_replan_is_refused(reply_was_lost: bool) -> None:
    """The manager does not know the sequence any more, which the repeated step's reply explains."""
    driven, _ = fetching(beside=True)
    driven.manager.refuse_acquires_and_replans()
    driven.move_pages()
    driven.lose_session(reply_was_lost=reply_was_lost)
    driven.run()
    driven.check_over()


def test_preempted_request_does_not_wait_for_one_that_left_with_it() -> None:
    """The older is aborted before the younger's lease ends: nobody is left who could free anything later."""
    driven = machine(8)
    older = driven.ask(prompt(12, 1), max_tokens=18)
    driven.ask(prompt(12, 2), max_tokens=18)
    while not driven.scheduler._queues.departures:
        driven.exchange()
        if not driven.scheduler._queues.departures:
            driven.end_launch()
            driven.start()
    driven.abort(older)
    driven.end_launch()
    driven.run()
    driven.check_over()
