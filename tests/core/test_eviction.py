"""Policies by themselves: the order of leaves, segments, soft pins."""

from __future__ import annotations

import pytest

from cache_service.core.errors import InvalidInput
from cache_service.core.eviction import LeafOrder, Lru, Priority, SegmentedLru, make_policy
from cache_service.core.radix_node import Node, Root
from cache_service.core.types import Namespace

ROOT = Root(Namespace("model"), 1)


def leaf(name: int, *, pages: int = 1, uses: int = 0, priority: int = 0, soft: int = 0) -> Node:
    node = Node(ROOT, 0, bytes([name]), [b""], pages)
    node.uses, node.priority, node.soft_until_ms = uses, priority, soft
    return node


def names(policy: LeafOrder) -> list[int]:
    return [node.key[0] for node in policy.order()]


def fill(policy: LeafOrder, *nodes: Node) -> None:
    for node in nodes:
        policy.add(node)
    assert policy.victim() is next(policy.order())


@pytest.mark.parametrize("name", ["lru", "slru", "priority"])
def test_soft_pins_come_last_whatever_the_policy(name: str) -> None:
    policy = make_policy(name, 100)
    fill(policy, leaf(1, soft=5), leaf(2), leaf(3))
    assert names(policy) == [2, 3, 1]


@pytest.mark.parametrize("name", ["lru", "slru", "priority"])
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
