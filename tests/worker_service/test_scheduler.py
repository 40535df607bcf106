"""Cached prefixes, steps ahead of launches, several tokens at once, stops; on a pool with pages for everything."""

from __future__ import annotations

import pytest

from session.messages import Rates
from session.words import SequenceId
from tests.worker_service.large_pool_scheduler import distinct, launches, machine
from tests.worker_service.scheduler_machine import (
    NAMESPACE,
    VOCAB,
    Machine,
    full_group,
    next_of,
    packed,
    reference,
    window_group,
)
from worker_service.core.errors import InvalidField, QueueFull
from worker_service.core.launches import Launch
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.sequence import FinishReason, Request

# -- the cached prefix --


def test_only_what_is_not_cached_is_scheduled() -> None:
    """Case 15, page 4."""
    driven = machine(page_tokens=4)
    launches(driven, list(range(1, 10)))
    second = driven.ask([*range(1, 9), 10, 11])
    driven.run()
    batch = driven.launches[-1].batch
    assert batch.token_ids.tolist() == [10, 11]
    assert batch.positions.tolist() == [8, 9]
    usage = driven.clients[second].usage
    assert usage is not None
    assert (usage.cached_tokens, usage.computed_tokens) == (8, 2)


def test_repeated_long_prompt() -> None:
    """Case 18: 7,820 tokens three times."""
    driven, prompt = machine(), distinct(7820, 3)
    usages = []
    for _ in range(3):
        sequence_id = driven.ask(prompt)
        driven.run()
        usages.append(driven.clients[sequence_id].usage)
    assert [usage and usage.cached_tokens for usage in usages] == [0, 7808, 7808]
    assert [usage and usage.computed_tokens for usage in usages] == [7820, 12, 12]


def test_cached_prefix_costs_no_budget() -> None:
    """M10: the first chunk spans the whole prefix and a full budget of new tokens."""
    driven = machine(token_budget=64, max_num_seqs=4)
    launches(driven, distinct(320, 1))
    before = len(driven.launches)
    launches(driven, distinct(320, 1) + distinct(100, 7))
    first = driven.launches[before]
    assert (first.rows[0].first_token, first.rows[0].num_tokens) == (320, 64)
    assert first.batch.cu_seqlens_k.tolist() == [0, 384]


def test_whole_prompt_cached_leaves_a_page_to_compute() -> None:
    """M13: logits are needed."""
    driven = machine()
    launches(driven, distinct(32, 1))
    assert launches(driven, distinct(32, 1))[-1] == [16]


def test_small_remainder_waits_for_a_launch_with_budget() -> None:
    """M11: a row that finds no budget is deferred; nothing overflows."""
    driven = machine(token_budget=16, max_num_seqs=4)
    assert launches(driven, distinct(16, 1), distinct(2, 2)) == [[16], [2]]


def test_decode_rows_come_before_prefill_rows() -> None:
    driven = machine(token_budget=32, max_num_seqs=4)
    driven.ask(distinct(8, 1), max_tokens=8)
    driven.turn()
    driven.ask(distinct(100, 2), max_tokens=2)
    driven.run()
    assert [row.num_tokens for row in driven.launches[2].rows] == [1, 16]
    assert driven.launches[2].batch.num_decode_seqs == 1
    driven.check_over()


# -- steps ahead of launches --


def test_pages_of_the_next_launch_are_asked_for_during_the_launch() -> None:
    """A decode row never waits for a page: while it fills one, the next is granted already."""
    driven = machine(page_tokens=4)
    driven.ask(distinct(4, 1), max_tokens=12)
    for _ in range(12):
        driven.turn()
        assert driven.launch is not None
    driven.run()
    driven.check_over()
    assert [launch.batch.num_tokens for launch in driven.launches] == [4] + [1] * 11


def test_no_page_is_asked_for_when_the_launch_in_flight_is_the_last() -> None:
    driven = machine(page_tokens=4)
    driven.ask(distinct(4, 1), max_tokens=1)
    driven.turn()
    assert driven.scheduler.next_step() is None


def test_nothing_to_say_is_no_step() -> None:
    driven = machine()
    driven.scheduler.report_rates(Rates(1.0, 1.0))
    assert driven.scheduler.next_step() is None
    driven.ask(distinct(20, 1), max_tokens=5)
    step = driven.scheduler.next_step()
    assert step is not None
    assert step.rates == Rates(1.0, 1.0)


def test_publish_follows_completion_not_the_schedule() -> None:
    driven = machine(page_tokens=4, token_budget=8, max_num_seqs=2)
    driven.ask(distinct(16, 1), max_tokens=2)
    driven.turn()
    assert driven.launch is not None
    assert driven.scheduler.next_step() is None  # launched is not computed
    driven.end_launch()
    step = driven.scheduler.next_step()
    assert step is not None
    assert [publish.computed_tokens for publish in step.publishes] == [8]


def test_last_sampled_token_is_not_published() -> None:
    """Case 7: its KV was never written. Prompt 8, page 4: 9 of 13 tokens fill 12 // 4 pages, the 13th has no KV."""
    driven = machine(page_tokens=4)
    driven.ask(distinct(8, 1), max_tokens=5)
    driven.run()
    prompt = distinct(8, 1)
    tokens = prompt + reference(NAMESPACE, prompt, 5)
    assert driven.manager.cached_tokens(NAMESPACE, [*tokens, 1, 2, 3, 4]) == 12


def test_finished_request_publishes_before_it_leaves() -> None:
    driven = machine(page_tokens=4)
    driven.ask(distinct(8, 1), max_tokens=1)
    driven.turn()
    driven.end_launch()
    step = driven.scheduler.next_step()
    assert step is not None
    assert [publish.computed_tokens for publish in step.publishes] == [8]
    assert [release.sequence_id for release in step.releases] == [SequenceId(1)]


def test_failed_launch_publishes_nothing_of_its_requests() -> None:
    driven = machine(page_tokens=4, token_budget=8, max_num_seqs=2)
    sequence_id = driven.ask(distinct(16, 1))
    driven.turn()
    driven.end_launch()
    driven.start()
    driven.fail()
    driven.run()
    assert driven.clients[sequence_id].failed
    assert driven.manager.cached_tokens(NAMESPACE, distinct(17, 1)) == 0
    assert not driven.manager.leases
    launches(driven, distinct(16, 1))


def test_a_row_that_fails_takes_nobody_along() -> None:
    driven = machine(page_tokens=4, token_budget=32, max_num_seqs=2)
    bad, good = (driven.ask(distinct(12, first), max_tokens=5) for first in (1, 40))
    driven.turn()
    rows = [row.sequence_id for row in driven.launches[-1].rows]
    assert set(rows) == {bad, good}
    driven.end_launch(failed_rows={rows.index(bad)})
    driven.run()
    assert driven.clients[bad].failed and driven.clients[bad].usage is None
    assert len(driven.clients[good].tokens) == 5
    assert not driven.manager.leases
    launches(driven, distinct(12, 1))


def test_window_pages_come_chunk_by_chunk() -> None:
    driven = machine(page_tokens=4, token_budget=8, max_num_seqs=2, groups=(full_group(99), window_group(9, 6)))
    assert launches(driven, distinct(30, 1)) == [[8], [8], [8], [6]]


# -- several tokens at once --


def accept(driven: Machine, tokens: list[int]) -> Launch:
    """Let the launch in flight accept these, right ones or not."""
    launch = driven.launch
    assert launch is not None
    driven.compute(launch)
    driven.launch = None
    for output in driven.scheduler.complete(launch, [tokens]):
        driven.take(output)
    return launch


@pytest.mark.parametrize("page_tokens", [1, 2, 4])
def test_accepting_more_tokens_than_a_page_holds(page_tokens: int) -> None:
    """R14, R16, R42: pages are granted for each token it may accept, and only accepted tokens with KV are published."""
    driven = machine(page_tokens=page_tokens, num_speculative_tokens=4)
    driven.ask([1, 2, 3], max_tokens=20)
    driven.turn()
    driven.exchange()
    driven.end_launch()
    driven.start()
    driven.exchange()
    accept(driven, [5, 6, 7, 8, 9])
    step = driven.scheduler.next_step()
    assert step is not None
    # Prompt 3, one sampled, five accepted: the last of nine tokens has no KV.
    assert step.publishes[-1].computed_tokens == 8
    sampled = next_of([1, 2, 3])
    driven.apply(driven.manager.step(step))
    assert driven.manager.cached_tokens(NAMESPACE, [1, 2, 3, sampled, 5, 6, 7, 8, 9]) == 8


def test_more_accepted_tokens_than_may_be_drafted_are_a_fault() -> None:
    driven = machine(num_speculative_tokens=1)
    driven.ask([1, 2, 3], max_tokens=20)
    driven.turn()
    driven.exchange()
    driven.end_launch()
    driven.start()
    with pytest.raises(ValueError, match="1 to 2 tokens"):
        accept(driven, [5, 6, 7])


def test_tokens_behind_a_stop_are_dropped() -> None:
    driven = machine(num_speculative_tokens=4, eos_token_ids=frozenset({6}))
    sampling = SamplingParams(max_tokens=20)
    driven.ask([1, 2, 3])
    driven.run()
    driven.scheduler.add(Request(SequenceId(9), NAMESPACE, packed([1, 2, 3]), sampling))
    driven.clients[SequenceId(9)] = driven.clients[SequenceId(1)]
    driven.clients[SequenceId(1)].tokens.clear()
    driven.exchange()
    driven.start()
    accept(driven, [5])
    driven.exchange()
    driven.start()
    accept(driven, [5, 6, 7])
    assert driven.clients[SequenceId(9)].tokens == [5, 5, 6]


# -- stops and requests --


@pytest.mark.parametrize(
    ("sampling", "expected", "reason"),
    [
        (SamplingParams(max_tokens=9), 1, FinishReason.STOP),
        (SamplingParams(max_tokens=3, ignore_eos=True), 3, FinishReason.LENGTH),
        (SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=frozenset({7})), 1, FinishReason.STOP),
        (SamplingParams(max_tokens=1), 1, FinishReason.STOP),
        (SamplingParams(max_tokens=99, ignore_eos=True), 7, FinishReason.LENGTH),
    ],
)
def test_stops(sampling: SamplingParams, expected: int, reason: FinishReason) -> None:
    """M17 too: ignore_eos gives exactly max_tokens; the longest sequence is max_model_len = 10."""
    scheduler = machine(eos_token_ids=frozenset({7}), max_model_len=10).scheduler
    scheduler.add(Request(SequenceId(1), NAMESPACE, packed([1, 2, 3]), sampling))
    driven = machine(max_model_len=10)
    driven.scheduler = scheduler
    outputs = []
    while scheduler.num_unfinished:
        driven.exchange()
        launch = scheduler.next_launch()
        if launch is not None:
            outputs += scheduler.complete(launch, [[7]] * launch.num_sampled)
    assert sum(len(output.token_ids) for output in outputs) == expected
    assert [output.finish for output in outputs] == [None] * (expected - 1) + [reason]


def test_finish_by_text() -> None:
    driven = machine(page_tokens=4)
    sequence_id = driven.ask(distinct(8, 1), max_tokens=50)
    for _ in range(3):
        driven.turn()
    usage = driven.scheduler.finish(sequence_id)
    assert usage is not None
    assert usage.generated_tokens == 2
    assert driven.scheduler.finish(sequence_id) is None
    driven.clients[sequence_id].failed = "its text ended"
    driven.run()
    assert not driven.manager.leases


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([], "empty"), ([1] * 20_000, "max_model_len"), ([1, VOCAB], "outside"), ([-1], "outside")],
)
def test_prompts_that_cannot_be_served(prompt: list[int], reason: str) -> None:
    driven = machine()
    with pytest.raises(InvalidField, match=reason):
        driven.ask(prompt)
    assert driven.scheduler.num_unfinished == 0


def test_odd_bytes_and_used_ids() -> None:
    driven = machine()
    with pytest.raises(InvalidField, match="int32"):
        driven.scheduler.add(Request(SequenceId(1), NAMESPACE, b"12345", SamplingParams()))
    driven.ask([1, 2])
    with pytest.raises(InvalidField, match="sequence_id"):
        driven.scheduler.add(Request(SequenceId(1), NAMESPACE, packed([1]), SamplingParams()))


def test_full_queue() -> None:
    driven = machine(max_waiting=2)
    driven.ask([1])
    driven.ask([2])
    with pytest.raises(QueueFull):
        driven.ask([3])
    driven.run()
    driven.ask([3])


def test_priority_goes_first_and_equals_in_order() -> None:
    driven = machine(max_num_seqs=1)
    ids = [driven.ask(distinct(20, start), priority=priority) for start, priority in enumerate([0, 1, 0, 1])]
    driven.run()
    assert driven.manager.order == [ids[1], ids[3], ids[0], ids[2]]
