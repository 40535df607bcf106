"""Chunks, their budget and their threshold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.worker_service.large_pool_scheduler import CONFIG, distinct, launches, machine
from worker_service.core.errors import InvalidField
from worker_service.core.launch_plan import chunk_len
from worker_service.core.scheduler import Scheduler


@pytest.mark.parametrize(
    ("lengths", "threshold", "expected"),
    [
        ([20], 8, [[8], [8], [4]]),
        ([5], 16, [[5]]),
        ([20, 20], 8, [[8, 8], [8, 8], [4, 4]]),
        ([20], 0, [[20]]),
    ],
)
def test_threshold_caps_each_sequence(lengths: list[int], threshold: int, expected: list[list[int]]) -> None:
    """Case 16, R31: no chunk is longer than the threshold; 0 means that there is none."""
    driven = machine(page_tokens=8 if threshold == 8 else 16, long_prefill_token_threshold=threshold)
    assert launches(driven, *(distinct(length, start) for start, length in enumerate(lengths))) == expected


def test_threshold_means_nothing_without_chunks() -> None:
    driven = machine(
        page_tokens=8, long_prefill_token_threshold=8, chunked_prefill=False, max_model_len=100, token_budget=100
    )
    assert launches(driven, distinct(20, 1)) == [[20]]


def test_threshold_and_budget_together() -> None:
    """Case 16, budget 10, threshold 8: what is left for the second is less than a page, so it is taken as it is."""
    driven = machine(page_tokens=8, long_prefill_token_threshold=8, token_budget=10, max_num_seqs=4)
    assert launches(driven, distinct(20, 1), distinct(20, 2))[0] == [8, 2]


def test_chunks_end_on_pages() -> None:
    driven = machine(long_prefill_token_threshold=128, token_budget=192)
    assert launches(driven, distinct(320, 1), distinct(320, 2))[0] == [128, 64]


def test_budget_is_shared_in_order() -> None:
    """Case 17: the last chunk is cut to whole pages of what the budget has left."""
    driven = machine(token_budget=200)
    assert launches(driven, *(distinct(128, start) for start in range(3)))[0] == [128, 64]


def test_prompt_longer_than_the_budget() -> None:
    """Case 17: positions 0..5, then 6..9, below one page of 16."""
    driven = machine(token_budget=6, max_num_seqs=2)
    assert launches(driven, distinct(10, 1)) == [[6], [4]]
    assert [launch.batch.positions.tolist() for launch in driven.launches] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert driven.launches[1].batch.cu_seqlens_k.tolist() == [0, 10]


def test_chunk_that_starts_inside_a_page_ends_on_a_boundary() -> None:
    assert chunk_len(6, 100, 40, CONFIG) == 26
    assert chunk_len(6, 100, 9, CONFIG) == 9


def test_without_chunks_a_prompt_waits_for_a_launch_that_holds_it() -> None:
    """Nobody younger goes first, or it would wait for ever."""
    driven = machine(chunked_prefill=False, max_model_len=100, token_budget=100)
    assert launches(driven, distinct(60, 1), distinct(50, 2), distinct(30, 3)) == [[60], [50, 30]]


@settings(max_examples=examples(120))
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    budget=st.integers(3, 200),
    page_tokens=st.sampled_from([1, 2, 8, 16, 64]),
    threshold=st.sampled_from([0, 64, 100]),
)
def test_any_prompts_budgets_and_pages(lengths: list[int], budget: int, page_tokens: int, threshold: int) -> None:
    """Within the budget (checked at every launch), all tokens once, and chunks end on pages where one fits."""
    driven = machine(
        token_budget=budget, page_tokens=page_tokens, max_num_seqs=3, long_prefill_token_threshold=threshold
    )
    ids = [driven.ask(distinct(length, start), max_tokens=3) for start, length in enumerate(lengths)]
    driven.run()
    driven.check_over()
    for sequence_id, length in zip(ids, lengths, strict=True):
        chunks, usage = driven.prefilled[sequence_id], driven.clients[sequence_id].usage
        assert usage is not None
        assert sum(chunks) == length - usage.cached_tokens == usage.computed_tokens
        assert not threshold or max(chunks) <= threshold
        end = usage.cached_tokens
        for chunk in chunks[:-1]:
            end += chunk
            assert end % page_tokens == 0 or chunk < page_tokens


def test_threshold_is_checked_against_the_page_size_in_force() -> None:
    """R32: a threshold of 16 is fine with pages of 16, and not once the model asked for pages of 128."""
    replace(CONFIG, long_prefill_token_threshold=16).validate()
    with pytest.raises(InvalidField, match="long_prefill_token_threshold"):
        replace(CONFIG, long_prefill_token_threshold=16, page_tokens=128).validate()
    with pytest.raises(InvalidField, match="long_prefill_token_threshold"):
        replace(CONFIG, long_prefill_token_threshold=CONFIG.max_model_len + 1).validate()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_budget": 8, "max_num_seqs": 9}, "token_budget"),
        ({"chunked_prefill": False}, "token_budget"),
        ({"groups": ()}, "groups"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ],
)
def test_configuration_that_cannot_work(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        Scheduler(replace(CONFIG, **changes))  # type: ignore[arg-type]
    assert caught.value.field == field
