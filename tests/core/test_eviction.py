"""Policies by themselves: the order of leaves, segments, soft pins."""

from __future__ import annotations

from itertools import pairwise
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.core.device.eviction_order import (
    POLICIES,
    Adaptive,
    EvictionPolicy,
    Lru,
    Priority,
    SegmentedLru,
    make_policy,
)
from cache_service.core.device.ghost_table import Ghost, GhostKind
from cache_service.core.device.lifetimes import PROTECT_ALL, Lifetimes
from cache_service.core.device.radix_node import Node, Root
from session.errors import InvalidInput
from session.words import Namespace
from tests.examples import examples

ROOT = Root(Namespace("model"), 1)


def leaf(name: int, *, pages: int = 1, uses: int = 0, priority: int = 0, soft: int = 0) -> Node:
    node = Node(ROOT, 0, bytes([name]), [b""], pages)
    node.uses, node.priority, node.soft_until_ms = uses, priority, soft
    return node


def names(policy: EvictionPolicy) -> list[int]:
    return [node.key[0] for node in policy.order()]


def fill(policy: EvictionPolicy, *nodes: Node) -> None:
    for node in nodes:
        policy.add(node)
    assert policy.victim() is next(policy.order())


@pytest.mark.parametrize("name", list(POLICIES))
def test_soft_pins_come_last_whatever_the_policy(name: str) -> None:
    policy = make_policy(name, 100)
    fill(policy, leaf(1, soft=5), leaf(2), leaf(3))
    assert names(policy) == [2, 3, 1]


@pytest.mark.parametrize("name", list(POLICIES))
def test_the_order_is_that_of_the_last_release(name: str) -> None:
    policy = make_policy(name, 100)
    one, two, three = leaf(1), leaf(2), leaf(3)
    fill(policy, one, two, three)
    policy.remove(one)
    assert one.queue is None
    policy.add(one)
    assert names(policy) == [2, 3, 1]


def test_slru_takes_leaves_seen_once_first() -> None:
    policy = SegmentedLru(100)
    fill(policy, leaf(1, uses=1), leaf(2), leaf(3, uses=2), leaf(4))
    assert names(policy) == [2, 4, 1, 3]


def test_slru_demotes_what_exceeds_the_protected_share() -> None:
    policy = SegmentedLru(10)
    old, new = leaf(1, pages=5, uses=1), leaf(2, pages=5, uses=1)
    fill(policy, leaf(3), old, new)
    assert names(policy) == [3, 1, 2] and old.uses == 0 and new.uses == 1


def test_slru_follows_leaves_that_shrink() -> None:
    policy = SegmentedLru(10)
    old, new = leaf(1, pages=8, uses=1), leaf(2, pages=4, uses=1)
    fill(policy, old)
    policy.shrunk(old, 4)
    old.resident -= 4
    fill(policy, new)
    assert old.uses == new.uses == 1
    policy.remove(old)
    policy.add(leaf(3, pages=4, uses=1))
    assert new.uses == 1


def test_priority_takes_lower_priorities_first_lru_within() -> None:
    policy = Priority()
    high, low = leaf(1, priority=5), leaf(2, priority=-5)
    fill(policy, high, leaf(3), low, leaf(4))
    assert names(policy) == [2, 3, 4, 1]
    policy.remove(low)
    assert names(policy) == [3, 4, 1]


def test_by_name() -> None:
    assert isinstance(make_policy("lru", 1), Lru)
    with pytest.raises(InvalidInput, match="policy"):
        make_policy("mru", 1)


def stream(policy: Adaptive, num_pages: int) -> None:
    """One-off prompts of one page each that nobody uses again."""
    for _ in range(num_pages):
        policy.stored(leaf(0))


def test_adaptive_starts_as_lru() -> None:
    policy = Adaptive(100)
    for node in (leaf(1, uses=1), leaf(2), leaf(3, uses=1), leaf(4)):
        policy.stored(node)
        fill(policy, node)
    assert names(policy) == [1, 2, 3, 4]


def test_adaptive_protects_what_is_used_again_later_than_a_pool_ago() -> None:
    policy = Adaptive(160)
    kept = leaf(1, pages=16)
    policy.stored(kept)
    for _ in range(10):
        stream(policy, 320)
        policy.used(kept)
        kept.uses += 1
    assert policy.lifetimes.ratio == PROTECT_ALL
    policy.add(kept)
    stream(policy, 320)
    fill(policy, leaf(2))
    policy.stored(leaf(3))
    assert names(policy) == [2, 1]


def test_adaptive_keeps_new_pages_while_second_uses_come_soon_and_no_third() -> None:
    policy = Adaptive(160)
    for _ in range(100):
        node = leaf(1, pages=16)
        policy.stored(node)
        stream(policy, 100)
        policy.used(node)
    assert policy.lifetimes.ratio < 8


def protecting(num_rounds: int) -> Adaptive:
    """All uses are of one prefix, each time after two pools."""
    policy, kept = Adaptive(160), leaf(1, pages=16)
    policy.stored(kept)
    for _ in range(num_rounds):
        stream(policy, 320)
        policy.used(kept)
        kept.uses += 1
    return policy


def test_adaptive_waits_until_the_pool_was_filled_twice() -> None:
    policy = Adaptive(160)
    for _ in range(6):
        node = leaf(1, uses=1)
        policy.stored(node)
        stream(policy, 50)
        policy.used(node)
        assert policy.lifetimes.ratio == 1.0
    stream(policy, 50)
    assert policy.lifetimes.ratio > 1.0


def test_the_ratio_does_not_jump() -> None:
    """A change of the traffic is followed within some pools, not at once."""
    policy = protecting(10)
    assert policy.lifetimes.ratio == PROTECT_ALL
    ratios = []
    for _ in range(100):
        node = leaf(1, pages=16)
        policy.stored(node)
        stream(policy, 100)
        policy.used(node)
        ratios.append(policy.lifetimes.ratio)
    octaves = [min(log2(ratio), 6.5) for ratio in ratios]
    steps = [abs(later - before) for before, later in pairwise(octaves)]
    assert ratios[-1] < 8 and max(steps) < 6.5 * (1 - (7 / 8) ** 12)


def test_lifetimes_that_queues_cannot_make_are_not_considered() -> None:
    """Trunks live about twice as long after their last use in one queue already."""
    pairs = protecting(10).lifetimes._pairs()
    assert len(pairs) > 3 and pairs[0].once == 0
    assert all(pair.again >= 2 * pair.once for pair in pairs)


def test_adaptive_learns_from_ghosts() -> None:
    policy = Adaptive(160)
    for _ in range(20):
        stream(policy, 320)
        policy.returned(Ghost(GhostKind.AGAIN, 20, 31), 16)
        policy.stored(leaf(1, pages=16, uses=1))
    assert policy.lifetimes.ratio == PROTECT_ALL


def test_lifetimes_count_every_page_once() -> None:
    lifetimes = Lifetimes(160)
    lifetimes.stored(False, 40)
    lifetimes.grown(False, 40, 10)
    assert (lifetimes.pages(False), lifetimes.pages(True)) == (50, 0)
    lifetimes.used(False, 40, 50)
    assert (lifetimes.pages(False), lifetimes.pages(True)) == (0, 50)
    lifetimes.returned(True, 40, 50)
    assert lifetimes.pages(True) == 0
    lifetimes.stored(False, 160 * 9)  # what is older than eight pools is forgotten
    lifetimes.used(False, 0, 5)
    assert (lifetimes.pages(False), lifetimes.pages(True)) == (160 * 9, 5)


@settings(max_examples=examples(50))
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 400), st.integers(1, 40))), st.integers(1, 99)
)
def test_the_ratio_stays_within_its_bounds_whatever_comes(
    calls: list[tuple[int, bool, int, int]], pool_pages: int
) -> None:
    lifetimes = Lifetimes(pool_pages)
    for kind, again, age, num_pages in calls:
        used_at = lifetimes.clock - age
        if kind == 0:
            lifetimes.stored(again, num_pages)
        elif kind == 1:
            lifetimes.used(again, used_at, num_pages)
        elif kind == 2:
            lifetimes.returned(again, used_at, num_pages)
        else:
            lifetimes.grown(again, used_at, num_pages)
        assert 1 <= lifetimes.ratio <= PROTECT_ALL
