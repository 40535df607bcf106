"""How far ahead decoding sequences have pages: as far as free pages allow, at nobody's cost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from session.messages import Step
from session.words import SequenceId
from tests.worker_service.scheduler_machine import VOCAB, Machine, full_group, window_group
from worker_service.core.scheduler_config import SchedulerConfig

PAGE = 4
CONFIG = SchedulerConfig(
    page_tokens=PAGE,
    groups=(full_group(100),),
    max_model_len=1000,
    vocab_size=VOCAB,
    token_budget=64,
    max_num_seqs=8,
    decode_ahead_tokens=8,
    max_decode_ahead_tokens=10_000,
)


def machine(num_pages: int, **changes: object) -> Machine:
    return Machine(replace(CONFIG, groups=(full_group(num_pages),), **changes))  # type: ignore[arg-type]


def tokens_without_replies(driven: Machine) -> list[int]:
    """How many tokens each request gets from launches alone, until none has pages."""
    before = {name: len(client.tokens) for name, client in driven.clients.items()}
    while driven.start() or driven.end_launch():
        pass
    return [len(client.tokens) - before[name] for name, client in driven.clients.items()]


def decode_for(driven: Machine, num_turns: int) -> None:
    for _ in range(num_turns):
        assert driven.turn()
    driven.end_launches()


def held_ahead(driven: Machine, sequence_id: SequenceId) -> int:
    (sequence,) = [one for one in driven.scheduler._queues.leased if one.sequence_id == sequence_id]
    return len(sequence.tables[0]) * PAGE - sequence.launched_len


@pytest.mark.parametrize("num_streams", [1, 2, 4])
def test_streams_share_half_of_the_free_pages(num_streams: int) -> None:
    driven = machine(100)
    for number in range(num_streams):
        driven.ask([number] * 8, max_tokens=900)
    decode_for(driven, 6)
    free_pages = driven.manager.cache.groups[0].pool.num_free
    assert 50 - 2 * num_streams <= free_pages <= 60
    counts = tokens_without_replies(driven)
    share = 400 // (2 * num_streams)
    assert all(share * 5 // 8 <= count <= share for count in counts), "three quarters at least, less what was decoded"


def test_nobody_asks_for_more_than_an_answer_may_have() -> None:
    driven = machine(100)
    sequence_id = driven.ask([1] * 8, max_tokens=40)
    decode_for(driven, 3)
    assert 32 <= held_ahead(driven, sequence_id) <= 40
    assert driven.manager.cache.groups[0].pool.num_free == 100 - 12
    (count,) = tokens_without_replies(driven)
    assert len(driven.clients[sequence_id].tokens) == 40 and count >= 35, "it ends without a word of the cache service"


def test_the_setting_bounds_it() -> None:
    driven = machine(100, max_decode_ahead_tokens=20)
    sequence_id = driven.ask([1] * 8, max_tokens=900)
    decode_for(driven, 6)
    assert 8 < held_ahead(driven, sequence_id) <= 24


@pytest.mark.parametrize("most", [0, 10_000])
def test_in_a_full_pool_nothing_is_evicted_for_it(most: int) -> None:
    """What was cached stays, but for what the streams themselves need."""
    driven = machine(100, max_decode_ahead_tokens=most)
    for number in range(12):
        driven.ask([number] * 33, max_tokens=1)
        driven.run()
    assert driven.manager.cache.groups[0].pool.num_free == 4
    sequence_id = driven.ask([20] * 8, max_tokens=900)
    decode_for(driven, 12)
    assert held_ahead(driven, sequence_id) <= 8 + PAGE
    assert driven.manager.cache.counters.evicted <= 3


def test_pages_ahead_are_used_up_and_not_renewed_when_pages_run_short() -> None:
    driven = machine(60)
    sequence_id = driven.ask([1] * 8, max_tokens=900)
    decode_for(driven, 4)
    held = held_ahead(driven, sequence_id)
    assert held > 80
    for number in range(2, 12):
        driven.ask([number] * 33, max_tokens=1)
    decode_for(driven, 40)
    assert held_ahead(driven, sequence_id) < held - 30


def test_while_a_request_waits_for_pages_nobody_takes_more_ahead_than_ever() -> None:
    """The one that waits needs more than is free; what is free is not taken by those that run."""
    driven = machine(40)
    running = driven.ask([1] * 40, max_tokens=110)
    decode_for(driven, 2)
    assert held_ahead(driven, running) > 40
    waiting = driven.ask([2] * 120, max_tokens=1)
    decode_for(driven, 3)
    assert held_ahead(driven, running) <= 8 + PAGE
    decode_for(driven, 60)
    assert driven.scheduler.num_waiting == 1 and driven.manager.cache.groups[0].pool.num_free > 10
    assert held_ahead(driven, running) <= 8 + PAGE
    driven.run()
    assert driven.clients[waiting].usage is not None
    driven.check_over()


@pytest.mark.parametrize("takes_them_back", [True, False])
def test_a_prompt_that_lacks_pages_gets_those_that_are_held_ahead(takes_them_back: bool) -> None:
    driven = machine(60)
    driven.scheduler._terms.may_shrink = takes_them_back
    running = driven.ask([1] * 8, max_tokens=230)
    decode_for(driven, 4)
    assert held_ahead(driven, running) > 80
    prompt = driven.ask([2] * 180, max_tokens=1)
    decode_for(driven, 12)
    assert (driven.clients[prompt].usage is not None) == takes_them_back
    assert len(driven.clients[running].tokens) >= 12, "its stream goes on"
    driven.run()
    driven.check_over()
    assert all(client.usage is not None and not client.usage.num_preemptions for client in driven.clients.values())


def test_a_row_that_lacks_pages_gets_those_that_another_holds_ahead() -> None:
    """Else the youngest would be preempted, though there are pages that nobody writes to."""
    driven = machine(40)
    first = driven.ask([1] * 8, max_tokens=140)
    decode_for(driven, 6)
    assert held_ahead(driven, first) > 60
    driven.ask([2] * 60, max_tokens=8)
    driven.ask([3] * 8, max_tokens=9)
    driven.run()
    driven.check_over()
    assert all(client.usage is not None and not client.usage.num_preemptions for client in driven.clients.values())


def test_launches_in_flight_write_to_no_page_that_is_given_back() -> None:
    """Each launch writes to the device's memory, which tells of a page that was another's by then."""
    driven = machine(60)
    running = driven.ask([1] * 8, max_tokens=230)
    decode_for(driven, 4)
    driven.ask([2] * 180, max_tokens=1)
    for _ in range(40):
        driven.start()
        driven.start_ahead()
        driven.exchange()
        driven.end_launch()
    assert driven.num_queued > 20
    driven.run()
    driven.check_over()
    assert len(driven.clients[running].tokens) == 230


@pytest.mark.parametrize("reply_was_lost", [True, False])
def test_a_step_that_gives_pages_back_is_repeated(reply_was_lost: bool) -> None:
    driven = machine(60)
    driven.ask([1] * 8, max_tokens=230)
    decode_for(driven, 4)
    driven.ask([2] * 180, max_tokens=1)
    decode_for(driven, 1)
    assert driven.scheduler._admission.lacks_pages
    num_free = driven.manager.cache.groups[0].pool.num_free
    driven.lose_session(reply_was_lost=reply_was_lost)
    assert driven.manager.cache.groups[0].pool.num_free != num_free
    driven.run()
    driven.check_over()


def test_a_window_pool_bounds_it_too() -> None:
    """The pool of windows is small: what is free there is what the streams share."""
    driven = Machine(replace(CONFIG, groups=(full_group(200), window_group(20, 8))))
    sequence_id = driven.ask([1] * 8, max_tokens=400)
    decode_for(driven, 6)
    assert held_ahead(driven, sequence_id) <= 10 * PAGE + PAGE
    driven.run()
    driven.check_over()


def test_a_service_that_does_not_tell_its_free_pages_is_asked_as_ever() -> None:
    driven = machine(100)
    answer = driven.manager.step

    def silent(step: Step):  # type: ignore[no-untyped-def]
        return answer(step)._replace(free_pages=())

    driven.manager.step = silent  # type: ignore[method-assign]
    sequence_id = driven.ask([1] * 8, max_tokens=900)
    decode_for(driven, 6)
    assert held_ahead(driven, sequence_id) <= 8 + PAGE


def test_conversations_hit_as_much() -> None:
    """In a pool that holds a third of them. Which answers come differs from process to process, so hits do a little;
    benchmarks/bench_decode_ahead.py compares them over a trace."""
    without, with_pages_ahead = (sum(cached_tokens(seed, most) for seed in range(8)) for most in (0, 10_000))
    assert without > 5_000
    assert with_pages_ahead >= 0.9 * without


def cached_tokens(seed: int, most: int) -> int:
    source = random.Random(seed)
    driven = machine(160, max_decode_ahead_tokens=most, token_budget=256)
    for _ in range(60):
        talk = source.randrange(12)
        driven.ask([talk] * source.choice([20, 40, 60]), max_tokens=source.choice([3, 10, 120]))
        for _ in range(source.randrange(40)):
            driven.turn()
    driven.run()
    driven.check_over()
    return sum(client.usage.cached_tokens for client in driven.clients.values() if client.usage is not None)
