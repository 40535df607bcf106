"""The pool: every id once, vacant ones as they were given back, never page 0."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.core.page_pool import PagePool, pack, unpack


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


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=40))
def test_conserves_every_page(moves: list[tuple[bool, int]]) -> None:
    pool, held = PagePool(12), []
    for takes, count in moves:
        if takes and count <= pool.num_free:
            held += unpack(pool.take(count))
        elif not takes:
            pool.give(pack(held[:count]))
            del held[:count]
        assert len(set(held)) == len(held)
        assert pool.num_free == 12 - len(held)
        assert all(1 <= page <= 12 and not pool.is_free(page) for page in held)
