"""Eviction policies: in which order evictable leaves go. Each names the next victim; none frees, cuts or pins.

    lru       one queue; the leaf that was released longest ago goes first
    slru      prefixes that were used again (or came back from a ghost) are protected from those seen once
    adaptive  the same, but for as long as pays: between lru and slru, learnt from the uses
    priority  lower priority first, lru within

Which pages may go is decided before: by pins in evictable.py, by readers in sparse_pages.py.
Whatever the policy, prefixes under a Pin call (`soft_until_ms`) come last. WINDOW pages go by these policies' classes,
in window_order.py; snapshots have an order of their own, in snapshot_order.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from heapq import merge
from itertools import chain
from typing import ClassVar

from cache_service.core.device.ghost_table import Ghost, GhostKind
from cache_service.core.device.lifetimes import Lifetimes
from cache_service.core.device.radix_node import Node, Queue
from session.errors import InvalidInput

# The share of the pool that SLRU keeps for prefixes that were used again.
PROTECTED_SHARE = 0.8


class EvictionPolicy(ABC):
    """Keeps the order of leaves that the tree tells it of. `node.queue` holds the node; None outside the order."""

    counts_uses: ClassVar[bool]
    has_priorities: ClassVar[bool] = False
    protected_share: ClassVar[float] = 1.0
    """Share of a WINDOW group that classes above 0 may take; the oldest pages above it fall to class 0. Snapshots have
    their own share (snapshot_order.py)."""

    @abstractmethod
    def add(self, node: Node) -> None:
        """Puts a node into the order that became a leaf that no lease holds, as just used."""

    def remove(self, node: Node) -> None:
        """Takes the node out of the order: it is no such leaf any more."""
        assert node.queue is not None
        del node.queue[node]
        node.queue = None

    def shrunk(self, node: Node, num_pages: int) -> None:
        """A node in the order lost pages; it keeps its place."""
        return

    @abstractmethod
    def victim(self) -> Node:
        """Returns the first leaf that no spill ticket holds; there is one."""

    @abstractmethod
    def order(self) -> Iterator[Node]:
        """Yields every node in the order, next victim first."""

    # WINDOW pages are ordered by the nodes in which they stand.

    def eviction_class(self, node: Node) -> int:
        """Returns the class in which the node's pages wait for their eviction; within one, the oldest goes first."""
        return 0

    def next_class(self, ages: Mapping[int, int]) -> int:
        """Returns the class that loses its oldest page next; `ages`: for each class, that page's age."""
        return min(ages)

    # What a policy may learn from; most do not.

    def stored(self, node: Node) -> None:
        """The node is new in the tree; its `uses` are set."""
        return

    def grown(self, node: Node, num_pages: int) -> None:
        """The node got more pages."""
        return

    def used(self, node: Node) -> None:
        """A request uses the node; this use is not in `uses` yet."""
        return

    def returned(self, ghost: Ghost, num_pages: int) -> None:
        """The first pages of an evicted run will be stored again."""
        return


class Lru(EvictionPolicy):
    """Least recently released first."""

    counts_uses: ClassVar[bool] = False

    def __init__(self) -> None:
        self._queue: Queue = OrderedDict()
        self._soft: Queue = OrderedDict()

    def add(self, node: Node) -> None:
        queue = self._soft if node.soft_until_ms else self._queue
        queue[node] = None
        node.queue = queue

    def victim(self) -> Node:
        return _unheld(self._queue, self._soft)

    def order(self) -> Iterator[Node]:
        return chain(self._queue, self._soft)


class SegmentedLru(EvictionPolicy):
    """Leaves used once are evicted before leaves used again, as long as these take at most their share."""

    counts_uses: ClassVar[bool] = True
    protected_share: ClassVar[float] = PROTECTED_SHARE

    def __init__(self, num_pages: int) -> None:
        self._limit = int(num_pages * PROTECTED_SHARE)
        self._pages = 0  # in the protected queue
        self._probation: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()
        self._soft: Queue = OrderedDict()

    def add(self, node: Node) -> None:
        if node.soft_until_ms:
            node.queue = self._soft
        elif node.uses:
            node.queue = self._protected
            self._pages += node.resident
        else:
            node.queue = self._probation
        node.queue[node] = None
        while self._pages > self._limit:
            self._demote(next(iter(self._protected)))

    def _demote(self, node: Node) -> None:
        del self._protected[node]
        self._pages -= node.resident
        node.uses = 0
        node.queue = self._probation
        self._probation[node] = None

    def remove(self, node: Node) -> None:
        if node.queue is self._protected:
            self._pages -= node.resident
        super().remove(node)

    def shrunk(self, node: Node, num_pages: int) -> None:
        if node.queue is self._protected:
            self._pages -= num_pages

    def victim(self) -> Node:
        return _unheld(self._probation, self._protected, self._soft)

    def order(self) -> Iterator[Node]:
        return chain(self._probation, self._protected, self._soft)

    def eviction_class(self, node: Node) -> int:
        return int(node.uses > 0)


class Adaptive(EvictionPolicy):
    """Two queues by last release; the first leaf goes whose age is the larger part of its queue's lifetime."""

    counts_uses: ClassVar[bool] = True

    def __init__(self, num_pages: int) -> None:
        self.lifetimes = Lifetimes(num_pages)
        self._once: Queue = OrderedDict()
        self._again: Queue = OrderedDict()
        self._soft: Queue = OrderedDict()

    def add(self, node: Node) -> None:
        node.queue = self._soft if node.soft_until_ms else self._again if node.uses else self._once
        node.queue[node] = None
        node.queued_at = self.lifetimes.clock

    def victim(self) -> Node:
        once, again = _first_unheld(self._once), _first_unheld(self._again)
        if once is None or again is None:
            return once or again or _unheld(self._soft)
        clock, ratio = self.lifetimes.clock, self.lifetimes.ratio
        return once if (clock - once.queued_at) * ratio >= clock - again.queued_at else again

    def _rank(self, node: Node) -> float:
        """Returns the node's place in the order of both queues: the lowest goes first."""
        age = self.lifetimes.clock - node.queued_at
        return -age if node.queue is self._again else -age * self.lifetimes.ratio

    def order(self) -> Iterator[Node]:
        return chain(merge(self._once, self._again, key=self._rank), self._soft)

    def eviction_class(self, node: Node) -> int:
        return int(node.uses > 0)

    def next_class(self, ages: Mapping[int, int]) -> int:
        return 0 if ages[0] * self.lifetimes.ratio >= ages[1] else 1

    def stored(self, node: Node) -> None:
        self.lifetimes.stored(node.uses > 0, node.resident)
        node.used_at = self.lifetimes.clock

    def grown(self, node: Node, num_pages: int) -> None:
        self.lifetimes.grown(node.uses > 0, node.used_at, num_pages)

    def used(self, node: Node) -> None:
        self.lifetimes.used(node.uses > 0, node.used_at, node.resident)
        node.used_at = self.lifetimes.clock

    def returned(self, ghost: Ghost, num_pages: int) -> None:
        """The ghost's age counts from its eviction; the age that it had then is taken from the oldest leaf of today."""
        is_again = ghost.kind is GhostKind.AGAIN
        oldest = next(iter(self._again if is_again else self._once), None)
        lifetimes = self.lifetimes
        used_at = (oldest.used_at if oldest else lifetimes.clock) - ghost.age * lifetimes.unit_pages
        lifetimes.returned(is_again, used_at, num_pages)


class Priority(EvictionPolicy):
    """Lower priority first; least recently released first within one priority."""

    counts_uses: ClassVar[bool] = False
    has_priorities: ClassVar[bool] = True

    def __init__(self) -> None:
        self._levels: list[int] = []
        self._queues: dict[int, Queue] = {}
        self._soft: Queue = OrderedDict()

    def add(self, node: Node) -> None:
        node.queue = self._soft if node.soft_until_ms else self._queue_of(node.priority)
        node.queue[node] = None

    def _queue_of(self, priority: int) -> Queue:
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = OrderedDict()
            insort(self._levels, priority)
        return queue

    def remove(self, node: Node) -> None:
        queue = node.queue
        assert queue is not None
        del queue[node]
        node.queue = None
        if not queue and queue is self._queues.get(node.priority):
            del self._queues[node.priority]
            self._levels.remove(node.priority)

    def victim(self) -> Node:
        return _unheld(*(self._queues[level] for level in self._levels), self._soft)

    def order(self) -> Iterator[Node]:
        return chain(*(self._queues[level] for level in self._levels), self._soft)

    def eviction_class(self, node: Node) -> int:
        return node.priority


def _unheld(*queues: Queue) -> Node:
    """Returns the first node that no ticket pins; only tickets pin nodes in the order, so few are passed over."""
    for queue in queues:
        for node in queue:
            if not node.pins:
                return node
    raise AssertionError("no page is evictable")


def _first_unheld(queue: Queue) -> Node | None:
    for node in queue:
        if not node.pins:
            return node
    return None


# The policies by name; each is made with the number of pages of its pool.
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "adaptive": Adaptive,
    "lru": lambda num_pages: Lru(),
    "slru": SegmentedLru,
    "priority": lambda num_pages: Priority(),
}


def make_policy(name: str, num_pages: int) -> EvictionPolicy:
    """Returns the policy of that name for a pool of that size; raises InvalidInput where there is none."""
    if name not in POLICIES:
        raise InvalidInput("policy", f"{name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name](num_pages)
