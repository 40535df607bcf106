"""Marks of evicted runs: found until taken or pushed out, within bounds, and seldom found by mistake."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.core import ghost_table
from cache_service.core.ghost_table import GENERATIONS, Ghost, GhostKind, GhostTable, fingerprint

ONCE, AGAIN, CLEARED = GhostKind.ONCE, GhostKind.AGAIN, GhostKind.CLEARED


def test_a_mark_is_found_until_it_is_taken() -> None:
    table = GhostTable(100, 16)
    table.add(7, AGAIN, 3)
    assert table.find(7) == Ghost(AGAIN, 3, 0) and table.find(8) is None
    assert table.take(7) == Ghost(AGAIN, 3, 0)
    assert table.find(7) is None and table.take(7) is None
    assert table.num_pages == 0


def test_the_newest_word_about_a_page_counts() -> None:
    table = GhostTable(8, 16)
    for kind in (ONCE, AGAIN, CLEARED):  # one page fills a generation
        table.add(7, kind, 2)
    assert table.find(7) == Ghost(CLEARED, 2, 0)
    assert table.take(7) == Ghost(CLEARED, 2, 0) and table.find(7) is None


def test_age_counts_pages_cut_since_in_parts_of_the_pool() -> None:
    table = GhostTable(1000, 160)
    table.add(1, ONCE, 5)
    table.add(2, ONCE, 25)
    assert table.find(1) == Ghost(ONCE, 5, 3) and table.find(2) == Ghost(ONCE, 25, 0)


def test_the_oldest_are_forgotten() -> None:
    table = GhostTable(8_000, 1000)
    for mark in range(1, 1001):
        table.add(mark, ONCE, 10)
        assert table.num_pages <= 8_000
    held = [mark for mark in range(1, 1001) if table.find(mark)]
    assert held == list(range(held[0], 1001)) and 800 - 2 * 800 // GENERATIONS <= len(held) <= 800


def test_what_came_back_leaves_room() -> None:
    """Not the marks that were left since count, but the pages that are remembered."""
    table = GhostTable(800, 100)
    table.add(1, ONCE, 80)
    for mark in range(2, 50):
        table.add(mark, ONCE, 80)
        table.take(mark)
    assert table.find(1) == Ghost(ONCE, 80, 48 * 80 // 6) and table.num_pages == 80
    table.check()


def test_runs_that_began_a_node_are_known() -> None:
    table = GhostTable(100, 16)
    table.add(1, ONCE, 3, opens_node=True)
    assert table.find(1) == Ghost(ONCE, 3, 0, opens_node=True)


def test_no_limit_no_ghosts() -> None:
    table = GhostTable(0, 100)
    table.add(1, ONCE, 1)
    assert table.find(1) is None and table.num_pages == 0 == table.num_marks


@pytest.mark.parametrize(
    ("pool_pages", "run_pages"), [(4_096, 1), (4_096, 8), (20_000, 1), (50_000, 8), (200_000, 40), (1_000_000, 60)]
)
def test_ghosts_cost_at_most_16_bytes_a_page_of_their_limit(pool_pages: int, run_pages: int) -> None:
    """Measured, at any time; the least that is remembered of one-page runs is half a pool."""
    limit = 4 * pool_pages
    tracemalloc.start()
    table = GhostTable(limit, pool_pages)
    for number in range(limit // run_pages * 5 // 4):
        table.add(fingerprint(b"", number, b""), ONCE, run_pages)
        if not number % 5_000:
            assert tracemalloc.get_traced_memory()[0] <= 16 * limit + 8_192
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes <= 16 * limit
    assert table.num_pages >= pool_pages * 0.4 * min(run_pages, 8)
    if run_pages >= 8:
        assert num_bytes <= 16 * table.num_pages


def test_the_largest_pool_has_bounded_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghost_table, "_MOST_MARKS", 1_000)
    unlimited = GhostTable(4 * 2**31, 2**31)
    for mark in range(3_000):
        unlimited.add(mark, ONCE, 1)
        assert unlimited.num_marks <= 1_000
    assert unlimited.find(2_999) and unlimited.find(2_200) and not unlimited.find(1_999)


def test_long_runs_are_cut_to_what_a_mark_can_say() -> None:
    table = GhostTable(10**9, 10**6)
    table.add(1, ONCE, 10**6)
    assert table.find(1) == Ghost(ONCE, 32_767, 0)


def test_unknown_pages_are_seldom_taken_for_ghosts() -> None:
    table = GhostTable(4 * 20_000, 20_000)
    for page in range(20_000):
        table.add(fingerprint(b"one", page, b"tokens"), ONCE, 1)
    assert not any(table.find(fingerprint(b"two", page, b"tokens")) for page in range(20_000))


@pytest.mark.parametrize("changed", [(b"b", 1, b"x"), (b"a", 2, b"x"), (b"a", 1, b"y")])
def test_a_fingerprint_depends_on_all_its_parts(changed: tuple[bytes, int, bytes]) -> None:
    assert fingerprint(*changed) != fingerprint(b"a", 1, b"x")


MOVES = st.tuples(st.sampled_from(["add", "take", "find"]), st.integers(1, 40), st.integers(1, 5))


@given(st.lists(MOVES, max_size=200))
def test_counts_stay_true(moves: list[tuple[str, int, Any]]) -> None:
    table, known = GhostTable(32, 8), {}
    for move, mark, pages in moves:
        if move == "add":
            table.add(mark, ONCE, pages)
            known[mark] = pages
        elif move == "take":
            ghost = table.take(mark)
            assert ghost is None or ghost.num_pages == known[mark]
            known.pop(mark, None)
            assert table.find(mark) is None
        else:
            ghost = table.find(mark)
            assert ghost is None or ghost.num_pages == known[mark]
        table.check()
