"""Pages of a WINDOW or STATE group: who reads each, where the published ones stand in the tree, which may go.

One page is in exactly one of these states:

    free        in the pool
    private     readers > 0, no place: a lease's or a ticket's own
    read        readers > 0, with a place in the tree
    evictable   readers = 0, with a place: stands in the order until it is read again or evicted

Evictable pages go COLD ones first, then WARM ones, then SOFT ones. Which of them is first is said for each kind in
window_order.py and snapshot_order.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from cache_service.core.device.eviction_order import EvictionPolicy
from cache_service.core.device.page_order import PageOrder
from cache_service.core.device.page_pool import PagePool, pack, unpack
from cache_service.core.device.radix_node import Node
from session.words import NO_PAGE, GroupSpec


class Retention(IntEnum):
    """How long an evictable page stays: the lowest go first."""

    COLD = 0  # left behind by a running window; snapshots where no prompt is known to end or to branch
    WARM = 1  # before a prompt's end or a branch
    SOFT = 2  # under a Pin call


class Use(NamedTuple):
    """When a lease last let go of a page, on the group's own count, and the retention and class that this gave it.

    `eviction_class` is the policy's class of the page's node; 0 where its retention is not WARM.
    """

    retention: Retention
    eviction_class: int
    stamp: int


class Place(NamedTuple):
    """The page number on the path of `node`; after splits the page may stand in an ancestor."""

    node: Node
    page: int

    def holder(self) -> Node:
        """The node that holds the page now."""
        return self.node.holder(self.page)


class SparsePages(ABC):
    """One group's pool, readers and evictable order."""

    def __init__(self, group: int, spec: GroupSpec, policy: EvictionPolicy) -> None:
        self.group, self.spec = group, spec
        self.pool = PagePool(spec.num_pages)
        self.readers: dict[int, int] = {}
        self.places: dict[int, Place] = {}
        self._policy = policy
        self._orders: dict[tuple[Retention, int], PageOrder] = {}
        self._order_of: dict[int, tuple[Retention, int]] = {}  # of evictable pages
        self._uses: dict[int, Use] = {}
        self._clock = 0
        self.num_evicted = 0
        self.emptied: list[Node] = []  # nodes that lost a page to an eviction; `DeviceCache.trim_emptied` empties it

    @property
    def num_evictable(self) -> int:
        return len(self._order_of)

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self.num_evictable

    def is_unread(self, page_id: int) -> bool:
        """Returns whether nobody reads the page: evictable, if it is a page of the tree."""
        return page_id not in self.readers

    def take(self, count: int) -> list[int]:
        """Returns `count` private pages with one reader each, evicting where it must; `count` must be available."""
        self.evict(count - self.pool.num_free)
        page_ids = unpack(self.pool.take(count))
        for page_id in page_ids:
            self.readers[page_id] = 1
        return page_ids

    def claim(self, page_ids: frozenset[int]) -> None:
        """Takes pages by their ids, with one reader each; they must be free."""
        self.pool.claim(page_ids)
        for page_id in sorted(page_ids):
            self.readers[page_id] = 1

    def read(self, page_ids: Iterable[int]) -> None:
        """Adds a reader to each published page."""
        for page_id in page_ids:
            held = self.readers.get(page_id, 0)
            self.readers[page_id] = held + 1
            if not held:
                self._leave_order(page_id)

    def drop(self, page_ids: Iterable[int], retention: Retention) -> None:
        """Removes a reader of each page. At none an unpublished page is freed, a published one becomes evictable."""
        freed = []
        for page_id in page_ids:
            held = self.readers[page_id] - 1
            self._clock += 1
            place = self.places.get(page_id)
            node = place.holder() if place is not None else None
            number = self._eviction_class(page_id, node) if node is not None and retention is Retention.WARM else 0
            self._uses[page_id] = Use(retention, number, self._stamp(page_id))
            if held:
                self.readers[page_id] = held
                continue
            del self.readers[page_id]
            if node is None:
                freed.append(page_id)
                del self._uses[page_id]
            else:
                self._append(page_id, (Retention.SOFT, 0) if node.soft_until_ms else (retention, number))
        if freed:
            self.pool.give(pack(freed))

    # The order, by kind.

    @abstractmethod
    def _eviction_class(self, page_id: int, node: Node) -> int:
        """Returns the class of a WARM page in this node."""

    @abstractmethod
    def _stamp(self, page_id: int) -> int:
        """Returns the place within its class of a page that becomes evictable now: the lowest is evicted first."""

    @abstractmethod
    def _append(self, page_id: int, key: tuple[Retention, int]) -> None:
        """Makes the page evictable, as just used."""

    @abstractmethod
    def _victim(self) -> int:
        """Returns the evictable page to go next; there is one."""

    def _order(self, page_id: int, key: tuple[Retention, int]) -> PageOrder:
        self._order_of[page_id] = key
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = PageOrder()
        return order

    def drop_unused(self, page_id: int) -> None:
        """Removes a reader that did not use the page: it keeps the place in the order that its last use gave it."""
        held, place = self.readers[page_id], self.places[page_id]  # a ticket's pages stand in the tree
        if held > 1:
            self.readers[page_id] = held - 1
            return
        del self.readers[page_id]
        last = self._uses.setdefault(page_id, Use(Retention.COLD, 0, 0))
        soft = place.holder().soft_until_ms
        self._order(page_id, (Retention.SOFT, 0) if soft else last[:2]).put_back(page_id, last.stamp)

    def publish(self, page_id: int, node: Node, page: int) -> None:
        """Fills the hole at that page number with a page that has readers."""
        node.set_page_id(self.group, page, page_id)
        node.spilled = min(node.spilled, page - node.start)
        self.places[page_id] = Place(node, page)

    def evict(self, count: int) -> None:
        """Evicts the first `count` victims; their places in the tree become holes."""
        for _ in range(min(count, self.num_evictable)):
            self.evict_one(self._victim())

    def evict_one(self, page_id: int) -> None:
        """Evicts this page; its place in the tree becomes a hole."""
        self._leave_order(page_id)
        place = self.places.pop(page_id)
        del self._uses[page_id]
        node = place.holder()
        node.set_page_id(self.group, place.page, NO_PAGE)
        self.emptied.append(node)
        self.num_evicted += 1
        self.pool.give(pack([page_id]))

    def discard(self, page_ids: bytes | bytearray) -> int:
        """Free the evictable pages of a run that was cut off the tree; holes are skipped. Returns how many."""
        freed = [page_id for page_id in unpack(page_ids) if page_id]
        for page_id in freed:
            del self.places[page_id]
            del self._uses[page_id]
            self._leave_order(page_id)
        if freed:
            self.num_evicted += len(freed)
            self.pool.give(pack(freed))
        return len(freed)

    def move(self, page_ids: Iterable[int], retention: Retention) -> None:
        """Moves evictable pages to the back of those with this retention."""
        for page_id in page_ids:
            if page_id and page_id not in self.readers:
                self._leave_order(page_id)
                self._clock += 1
                last = self._uses[page_id]
                self._uses[page_id] = last._replace(stamp=self._stamp(page_id))
                self._append(page_id, (retention, last.eviction_class if retention is Retention.WARM else 0))

    def _leave_order(self, page_id: int) -> None:
        key = self._order_of.pop(page_id)
        order = self._orders[key]
        order.remove(page_id)
        if not order:
            del self._orders[key]

    def check(self) -> None:
        """For audits: raises AssertionError where a kind's own books of its pages disagree."""
        return

    def order(self) -> dict[tuple[Retention, int], list[int]]:
        """Returns the evictable pages by retention and class, oldest first; for audits."""
        return {key: [page_id for _, page_id in self._orders[key].stamped()] for key in sorted(self._orders)}
