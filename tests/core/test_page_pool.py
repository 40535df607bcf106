"""The pool: every id once, vacant ones as they were given back, never page 0."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.core.device.page_pool import PagePool, pack, unpack


def test_takes_low_ids_first_and_never_page_0() -> None:
    pool = PagePool(4)
    assert unpack(pool.take(3)) == [1, 2, 3]
    assert pool.num_free == 1


def test_given_back_pages_are_taken_before_fresh_ones() -> None:
    pool = PagePool(5)
    pool.take(3)
    pool.give(pack([2]))
    assert unpack(pool.take(2)) == [2, 4]


def test_more_than_are_free_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError):
        PagePool(2).take(3)


def test_an_unlimited_pool_costs_nothing_until_used() -> None:
    pool = PagePool(2**31)
    assert unpack(pool.take(2)) == [1, 2]
    assert pool.num_free == 2**31 - 2


def test_claims_the_very_pages() -> None:
    pool = PagePool(6)
    pool.take(2)
    pool.give(pack([1]))
    pool.claim(frozenset({1, 5}))
    assert [pool.is_free(page) for page in range(1, 7)] == [False, False, True, True, False, True]
    assert sorted(unpack(pool.take(3))) == [3, 4, 6]


def test_a_claim_far_ahead_leaves_the_pages_before_it_fresh() -> None:
    pool = PagePool(2**31 - 1)
    pool.claim({200_000_000})
    assert (pool.fresh, pool.num_free) == (1, 2**31 - 2)
    assert not pool.is_free(200_000_000) and pool.is_free(199_999_999)
    pool.give(pack([200_000_000]))
    assert pool.is_free(200_000_000) and pool.num_free == 2**31 - 1
    pool.check()


def test_fresh_pages_are_taken_around_claimed_ones() -> None:
    pool = PagePool(6)
    pool.claim({2, 4})
    assert unpack(pool.take(2)) == [1, 3]
    assert (pool.fresh, pool.claimed_ahead) == (5, frozenset())
    assert unpack(pool.take(2)) == [5, 6]
    with pytest.raises(AssertionError):
        pool.take(1)


@pytest.mark.parametrize("page", [1, 3, 5])
def test_a_taken_page_cannot_be_claimed(page: int) -> None:
    pool = PagePool(6)
    pool.take(3)
    pool.claim({5})
    with pytest.raises(AssertionError, match="not free"):
        pool.claim({page})


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of Python the call runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("num_pages", [10_000, 1_000_000])
def test_claims_cost_their_pages_whatever_the_pool(num_pages: int) -> None:
    """The top of a fresh pool, then the middle of a list of free pages that a first question has looked through."""
    pool = PagePool(num_pages)
    assert lines_run(lambda: pool.claim(range(num_pages - 99, num_pages + 1))) < 100 * 30
    pool.give(pool.take(num_pages // 2))
    assert pool.is_free(1)
    assert lines_run(lambda: pool.claim(range(100, 200))) < 100 * 30
    assert lines_run(lambda: [pool.is_free(page) for page in range(1, 101)]) < 100 * 10
    assert pool.num_free == num_pages - 200


def test_a_far_claim_needs_no_memory_for_the_pages_before_it() -> None:
    pool = PagePool(2**31 - 1)
    tracemalloc.start()
    pool.claim({200_000_000, 2**31 - 1})
    assert not pool.is_free(2**31 - 1) and pool.is_free(2**31 - 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000


MOVES = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 5)),
    st.tuples(st.just("give"), st.integers(1, 5)),
    st.tuples(st.just("claim"), st.sets(st.integers(1, 12), min_size=1, max_size=4)),
    st.tuples(st.just("ask"), st.integers(0, 13)),
)


@given(st.lists(MOVES, max_size=40))
def test_conserves_every_page(moves: list[tuple[str, Any]]) -> None:
    pool, held = PagePool(12), []
    for move, what in moves:
        if move == "take" and what <= pool.num_free:
            held += unpack(pool.take(what))
        elif move == "give":
            pool.give(pack(held[:what]))
            del held[:what]
        elif move == "claim" and not what & set(held):
            pool.claim(what)
            held += sorted(what)
        elif move == "ask":
            assert pool.is_free(what) == (1 <= what <= 12 and what not in held)
        pool.check()
        assert len(set(held)) == len(held)
        assert pool.num_free == 12 - len(held)
        assert all(1 <= page <= 12 for page in held)
    assert [pool.is_free(page) for page in range(1, 13)] == [page not in held for page in range(1, 13)]
