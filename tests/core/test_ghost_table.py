"""Marks of evicted runs: found until taken or pushed out, within bounds, and seldom found by mistake."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.core.device import ghost_table
from cache_service.core.device.ghost_table import Ghost, GhostKind, GhostTable, mark_of

ONCE, AGAIN, CLEARED = GhostKind.ONCE, GhostKind.AGAIN, GhostKind.CLEARED


def mark(number: int) -> int:
    return mark_of(b"", number, b"")


def same_set(number: int) -> Iterator[int]:
    """Marks of one set of a table, with different tags."""
    return (number << 32 | tag for tag in count(1))


def test_a_mark_is_found_until_it_is_taken() -> None:
    table = GhostTable(100, 16)
    table.add(mark(7), AGAIN, 3)
    assert table.find(mark(7)) == Ghost(AGAIN, 3, 0) and table.find(mark(8)) is None
    table.take(mark(8))
    assert table.num_pages == 3
    table.take(mark(7))
    assert table.find(mark(7)) is None
    assert table.num_pages == 0


def test_the_newest_word_about_a_page_counts() -> None:
    table = GhostTable(8, 16)
    for kind in (ONCE, AGAIN, CLEARED):
        table.add(mark(7), kind, 2)
    assert table.find(mark(7)) == Ghost(CLEARED, 2, 0) and table.num_pages == 2
    table.take(mark(7))
    assert table.find(mark(7)) is None


def test_a_newer_word_in_another_entry_hides_the_older_and_both_are_taken() -> None:
    table = GhostTable(100, 16)
    one, two = islice(same_set(5), 2)
    table.add(one, ONCE, 1)
    table.add(two, ONCE, 2)
    table.take(one)
    table.add(two, AGAIN, 4)  # where `one` was
    assert table.find(two) == Ghost(AGAIN, 4, 0)
    table.check()
    table.take(two)
    assert table.find(two) is None and table.num_pages == 0
    table.check()


def test_age_counts_pages_cut_since_in_parts_of_the_pool() -> None:
    table = GhostTable(1000, 160)
    table.add(mark(1), ONCE, 5)
    table.add(mark(2), ONCE, 25)
    assert table.find(mark(1)) == Ghost(ONCE, 5, 3) and table.find(mark(2)) == Ghost(ONCE, 25, 0)


def test_the_oldest_are_forgotten_when_newer_pages_reach_the_limit() -> None:
    table = GhostTable(8_000, 1_000)
    for number in range(1, 1_001):
        table.add(mark(number), ONCE, 10)
        assert table.num_pages <= 8_000
    held = [number for number in range(1, 1_001) if table.find(mark(number))]
    lost = 1_001 - held[0] - len(held)  # in full sets
    unit = 1_000 // 16 // 10 + 1
    assert 800 - unit <= 1_001 - held[0] <= 800 and lost < 20
    table.check()


def test_a_unit_of_time_beyond_the_limit_is_forgotten_too() -> None:
    table = GhostTable(32, 160)  # less than two units
    table.add(mark(1), ONCE, 4)
    for number in range(2, 6):
        table.add(mark(number), ONCE, 1)
    table.add(mark(6), ONCE, 31)
    assert table.find(mark(6)) == Ghost(ONCE, 31, 0) and table.find(mark(5)) is None
    assert table.num_pages == 31
    table.check()


def test_what_came_back_leaves_room() -> None:
    """Not the marks that were left since count, but the pages that are remembered."""
    table = GhostTable(800, 100)
    table.add(mark(1), ONCE, 80)
    for number in range(2, 50):
        table.add(mark(number), ONCE, 80)
        table.take(mark(number))
    assert table.find(mark(1)) == Ghost(ONCE, 80, 49 * 80 // 6 - 80 // 6) and table.num_pages == 80
    table.check()


def test_a_full_set_loses_its_oldest_mark() -> None:
    table = GhostTable(1_000, 16)
    marks = list(islice(same_set(3), 6))
    for pages, held in enumerate(marks, 1):
        table.add(held, ONCE, pages)
    assert [table.find(held) is not None for held in marks] == [False, False, True, True, True, True]
    assert table.num_pages == 3 + 4 + 5 + 6
    table.check()


def test_entries_that_count_no_more_are_used_before_live_ones() -> None:
    table = GhostTable(20, 16)
    old, two, three, four, new = islice(same_set(3), 5)
    for held in (old, two, three, four):
        table.add(held, ONCE, 4)
    table.add(mark(100), ONCE, 8)  # `old` is forgotten
    assert table.find(old) is None
    table.take(mark(100))
    table.add(new, ONCE, 1)
    assert [table.find(held) is not None for held in (old, two, three, four, new)] == [False, True, True, True, True]
    table.check()


def test_runs_that_began_a_node_are_known() -> None:
    table = GhostTable(100, 16)
    table.add(mark(1), ONCE, 3, opens_node=True)
    assert table.find(mark(1)) == Ghost(ONCE, 3, 0, opens_node=True)


def test_no_limit_no_ghosts() -> None:
    table = GhostTable(0, 100)
    table.add(mark(1), ONCE, 1)
    table.take(mark(1))
    assert table.find(mark(1)) is None and table.num_pages == 0
    table.check()


@pytest.mark.parametrize(
    ("pool_pages", "run_pages"), [(4_096, 1), (4_096, 8), (20_000, 1), (50_000, 8), (200_000, 40), (1_000_000, 60)]
)
def test_ghosts_cost_at_most_16_bytes_a_page_of_their_limit(pool_pages: int, run_pages: int) -> None:
    """Measured, at any time; also runs of one page are remembered for a pool and a half."""
    limit = 4 * pool_pages
    tracemalloc.start()
    table = GhostTable(limit, pool_pages)
    for number in range(limit // run_pages * 5 // 4):
        table.add(mark(number), ONCE, run_pages)
        if not number % 5_000:
            assert tracemalloc.get_traced_memory()[0] <= 8 * limit + 8_192
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.num_pages >= pool_pages * (1.5 if run_pages == 1 else 3.5)
    assert num_bytes <= 16 * table.num_pages
    table.check()


def test_the_largest_pool_has_bounded_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghost_table, "_MOST_ENTRIES", 1_024)
    unlimited = GhostTable(4 * 2**31, 2**31)
    for number in range(5_000):
        unlimited.add(mark(number), ONCE, 1)
        assert unlimited.num_pages <= 1_024
    assert unlimited.find(mark(4_999)) and unlimited.num_pages > 900
    unlimited.check()


@pytest.mark.parametrize("most_units", [3, 40])
def test_time_never_wraps_around(monkeypatch: pytest.MonkeyPatch, most_units: int) -> None:
    """Everything is forgotten once instead: no old mark looks young, and new ones are found."""
    monkeypatch.setattr(ghost_table, "_MOST_UNITS", most_units)
    table = GhostTable(64, 16)
    added: list[int] = []
    for number in range(5 * most_units):
        table.add(mark(number), ONCE, 1)
        added.append(number)
        table.check()
        ages = [ghost.age for ghost in map(table.find, map(mark, reversed(added))) if ghost is not None]
        assert ages == sorted(ages) and ages[0] == 0 and ages[-1] < most_units
        if number % most_units == most_units - 1:
            assert ages == [0] and table.num_pages == 1


def test_a_mark_is_forgotten_after_64_pools() -> None:
    table = GhostTable(10**6, 16)
    table.add(mark(0), ONCE, 1)
    for number in range(1, 1_026):
        assert table.find(mark(0))
        table.add(mark(number), ONCE, 1)
        table.take(mark(number))
    assert table.find(mark(0)) is None and table.num_pages == 0
    table.check()


def test_long_runs_are_cut_to_what_a_mark_can_say() -> None:
    table = GhostTable(10**9, 10**6)
    table.add(mark(1), ONCE, 10**6)
    assert table.find(mark(1)) == Ghost(ONCE, 1_023, 0)
    assert ghost_table.STRIDE_PAGES <= 1_023


def test_unknown_pages_are_seldom_taken_for_ghosts() -> None:
    table = GhostTable(4 * 20_000, 20_000)
    for page in range(20_000):
        table.add(mark_of(b"one", page, b"tokens"), ONCE, 1)
    assert sum(table.find(mark_of(b"two", page, b"tokens")) is not None for page in range(20_000)) < 3


@pytest.mark.parametrize("changed", [(b"b", 1, b"x"), (b"a", 2, b"x"), (b"a", 1, b"y")])
def test_a_mark_depends_on_all_its_parts(changed: tuple[bytes, int, bytes]) -> None:
    assert mark_of(*changed) != mark_of(b"a", 1, b"x")


MOVES = st.tuples(st.sampled_from(["add", "take", "find"]), st.integers(1, 12), st.integers(1, 5))


@given(st.lists(MOVES, max_size=200), st.sampled_from([1, 3, 32, 1_000]), st.sampled_from([1, 8, 100]))
def test_counts_stay_true(moves: list[tuple[str, int, Any]], limit: int, pool_pages: int) -> None:
    """Three sets for twelve marks: they fill, overflow and expire."""
    table, known = GhostTable(limit, pool_pages), {}
    for move, number, pages in moves:
        held = number % 3 << 34 | number
        if move == "add":
            table.add(held, ONCE, pages)
            known[held] = min(pages, limit)
            assert table.find(held) == Ghost(ONCE, known[held], 0)
        elif move == "take":
            table.take(held)
            known.pop(held, None)
            assert table.find(held) is None
        else:
            ghost = table.find(held)
            assert ghost is None or ghost.num_pages == known[held]
        table.check()
