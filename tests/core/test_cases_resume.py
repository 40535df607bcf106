"""Which boundary several groups share, by residency alone; ids as in docs/cases.md. Pages of 4 tokens unless noted."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.core.device.eviction_order import Lru
from cache_service.core.kinds.group import resume
from cache_service.core.kinds.layout import make_groups, make_layout
from session.words import GroupKind, GroupSpec
from tests.core.world import full, state, window
from tests.examples import examples

Group = tuple[GroupSpec, set[int]]


def boundary(groups: list[Group], bound: int, page: int = 4) -> int:
    """In tokens."""
    flags = [bytes(int(i in pages) for i in range(bound)) for _, pages in groups]
    layout = make_layout(tuple(spec for spec, _ in groups), page)
    return resume(make_groups(layout, Lru()), flags, bound) * page


@pytest.mark.parametrize(
    ("tokens", "pages", "bound", "usable"),
    [
        (10, {1, 2, 3}, 5, 16),
        (10, {2, 3, 4}, 5, 20),
        (10, {2, 3, 4}, 4, 0),
        (10, {0, 1}, 2, 8),
        (10, {0, 1, 3, 4}, 5, 8),
        (4, {0, 2}, 3, 12),
        (1, set(), 7, 28),
        (5, {0, 2}, 3, 12),
        (6, {0, 2}, 3, 4),
    ],
)
def test_case_38_one_window(tokens: int, pages: set[int], bound: int, usable: int) -> None:
    assert boundary([(window(9, tokens), pages)], bound) == usable


@pytest.mark.parametrize(
    ("fulls", "windows", "usable"),
    [(4, {2, 3, 4}, 0), (4, {1, 2, 3, 4}, 16), (5, {1, 2, 3}, 16), (4, {0, 1, 2}, 12)],
)
def test_case_39_full_and_window(fulls: int, windows: set[int], usable: int) -> None:
    groups: list[Group] = [(full(9), set(range(fulls))), (window(9, 10), windows)]
    assert boundary(groups, 5) == boundary(groups[::-1], 5) == usable


def test_case_40_two_windows_in_any_order() -> None:
    first: list[Group] = [(full(9), set(range(6))), (window(9, 10), {0, 2, 3, 4}), (window(9, 10), {0, 1, 2, 3})]
    second: list[Group] = [
        (full(9), set(range(8))),
        (window(9, 10), {0, 1, 2, 4, 5, 6}),
        (window(9, 10), {0, 1, 3, 4, 5}),
    ]
    for order in permutations(range(3)):
        assert boundary([first[i] for i in order], 6) == 4
        assert boundary([second[i] for i in order], 8) == 8
    third: list[Group] = [(full(9), set(range(5))), (window(9, 6), {2, 3, 4}), (window(9, 2), {3})]
    assert boundary(third, 5, page=2) == 0


def test_case_41_42_snapshots() -> None:
    pages = set(range(8))
    assert boundary([(full(9), pages), (state(9), {3})], 8) == 16
    assert boundary([(full(9), set(range(5))), (state(9), set())], 1, page=256) == 0
    chain: Group = (full(9), {0, 1, 2})
    assert boundary([chain, (state(9), {0, 2})], 2, page=256) == 256
    assert boundary([chain, (state(9), {0, 1})], 3, page=256) == 512
    assert boundary([chain, (window(9, 128), {0, 2}), (state(9), {0, 1, 2})], 3, page=256) == 768
    assert boundary([chain, (window(9, 512), {0, 2}), (state(9), {0, 1, 2})], 3, page=256) == 256


def test_e19_residency_by_group() -> None:
    """Three pages of 16, FULL and two windows of two pages: what stays when one of them goes."""
    three = {0, 1, 2}

    def left(fulls: set[int], one: set[int], two: set[int]) -> int:
        return boundary([(full(9), fulls), (window(9, 33, "a"), one), (window(9, 33, "b"), two)], 3, page=16) // 16

    assert left(three, {1, 2}, {1, 2}) == 3
    assert left({1, 2}, three, three) == 0
    assert left({0, 1}, {0, 1}, {0, 1}) == 2
    assert left({0, 1}, three, three) == 2
    assert left(three, {0, 1}, three) == 2
    assert left(three, three, {0, 1}) == 2
    assert left({0, 1}, {1, 2}, three) == 0


def slow(groups: list[Group], bound: int, page: int) -> int:
    """Token by token, straight from the table of resume rules."""

    def fits(spec: GroupSpec, pages: set[int], at: int) -> bool:
        if spec.kind == GroupKind.STATE:
            return at == 0 or at // page - 1 in pages
        first = 0 if spec.kind == GroupKind.FULL else max(0, at - (spec.window_tokens - 1))
        return all(position // page in pages for position in range(first, at))

    return max(at for at in range(0, bound * page + 1, page) if all(fits(s, p, at) for s, p in groups))


KINDS = st.one_of(st.just(full(9)), st.builds(window, st.just(9), st.integers(1, 14)), st.just(state(9)))


@settings(max_examples=examples(300))
@given(
    groups=st.lists(st.tuples(KINDS, st.sets(st.integers(0, 7))), min_size=1, max_size=4),
    bound=st.integers(0, 8),
    page=st.sampled_from([1, 2, 4]),
)
def test_the_sweep_equals_the_definition(groups: list[Group], bound: int, page: int) -> None:
    assert boundary(groups, bound, page) == slow(groups, bound, page)
