"""Resume rules against the definition, boundary by boundary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.core.device.eviction_order import Lru
from cache_service.core.kinds.group import Group, limiting_group, residency, resume
from cache_service.core.kinds.layout import make_groups, make_layout
from session.words import GroupKind, GroupSpec

PAGE = 4


def spec(kind: str, window: int = 0) -> GroupSpec:
    return GroupSpec(f"{kind}{window}", GroupKind[kind], 100, 0, window)


def rule(group: GroupSpec) -> Group:
    return make_groups(make_layout((group,), PAGE), Lru())[0]


def can_resume(group: GroupSpec, flags: bytes, boundary: int) -> bool:
    """The rule as it is written down."""
    if boundary == 0:
        return True
    if group.kind == GroupKind.STATE:
        return bool(flags[boundary - 1])
    first = 0
    if group.kind == GroupKind.WINDOW:
        first = max(0, boundary * PAGE - (group.window_tokens - 1)) // PAGE
    return all(flags[first:boundary])


GROUPS = st.sampled_from([spec("FULL"), *(spec("WINDOW", w) for w in (1, 2, 4, 5, 6, 10, 13)), spec("STATE")])


@given(st.lists(GROUPS, min_size=1, max_size=3), st.data(), st.integers(0, 9))
def test_the_largest_boundary_at_which_every_group_can_resume(
    groups: list[GroupSpec], data: st.DataObject, limit: int
) -> None:
    flags = [bytes(data.draw(st.lists(st.integers(0, 1), min_size=limit, max_size=limit))) for _ in groups]
    expected = max(b for b in range(limit + 1) if all(map(can_resume, groups, flags, [b] * len(groups))))
    assert resume(list(map(rule, groups)), flags, limit) == expected
    limiting = limiting_group(list(map(rule, groups)), flags, limit)
    blocked = [group for group, held in zip(groups, flags, strict=True) if not can_resume(group, held, limit)]
    assert (limiting.spec if limiting else None) == (blocked[0] if blocked else None)


@pytest.mark.parametrize(("window", "pages"), [(1, 0), (2, 1), (4, 1), (5, 1), (6, 2), (10, 3)])
def test_window_pages(window: int, pages: int) -> None:
    assert rule(spec("WINDOW", window)).reach_pages() == pages


def test_a_window_starts_w_minus_1_tokens_before() -> None:
    assert [rule(spec("WINDOW", 10)).first_page(b) for b in (0, 8, 9, 13, 20)] == [0, 0, 0, 1, 2]


def test_residency_is_a_byte_a_page() -> None:
    assert residency(b"\x00\x00\x00\x00\x00\x01\x00\x00\x07\x00\x00\x00") == b"\x00\x01\x01"
