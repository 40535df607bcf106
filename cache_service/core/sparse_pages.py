"""Pages of a WINDOW or STATE group: who reads each, where the published ones stand in the tree, which may go.

Knows no token, hash or time. One page is in exactly one of these states:

    free        in the pool
    private     readers > 0, no place: a lease's or a ticket's own
    read        readers > 0, with a place in the tree
    evictable   readers = 0, with a place: stands in the order until it is read again or evicted
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import IntEnum
from heapq import heapify, heappop, heappush, merge
from typing import NamedTuple

from cache_service.core.page_pool import PagePool, pack, unpack
from cache_service.core.radix_node import Node
from cache_service.core.types import PAGE_ID_BYTES, GroupSpec


class Rank(IntEnum):
    """Which evictable pages go first."""

    COLD = 0  # left behind by a running window
    WARM = 1  # before a prompt's end or a branch, and every snapshot
    SOFT = 2  # under a Pin call


class Use(NamedTuple):
    """When a lease last let go of a page, on the group's own count, and the rank that this gave it."""

    rank: Rank
    stamp: int


class Place(NamedTuple):
    """The page number on the path of `node`; after splits the page may stand in an ancestor."""

    node: Node
    page: int

    def holder(self) -> Node:
        """The node in which the page stands now."""
        node = self.node
        while node.start > self.page:
            assert node.parent is not None
            node = node.parent
        return node


class _Order:
    """Pages of one rank, those first that were let go of longest ago; every page has a stamp of its own.

    A page that was copied meanwhile comes back with its old stamp. It waits in a heap beside the queue, since moving
    every newer entry behind it took 97 ms at 24,000 pages.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[int, int] = OrderedDict()  # stamps rise
        self._back: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []  # (stamp, page); also of pages that have left `_back`

    def __len__(self) -> int:
        return len(self._queue) + len(self._back)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._queue or page_id in self._back

    def __iter__(self) -> Iterator[int]:
        queued = ((stamp, page_id) for page_id, stamp in self._queue.items())
        back = sorted((stamp, page_id) for page_id, stamp in self._back.items())
        return (page_id for _, page_id in merge(queued, back))

    def append(self, page_id: int, stamp: int) -> None:
        self._queue[page_id] = stamp

    def put_back(self, page_id: int, stamp: int) -> None:
        self._back[page_id] = stamp
        heappush(self._heap, (stamp, page_id))
        if len(self._heap) > 2 * len(self._back) + 64:
            self._heap = [(stamp, page_id) for page_id, stamp in self._back.items()]
            heapify(self._heap)

    def remove(self, page_id: int) -> bool:
        """Whether it was here."""
        return self._queue.pop(page_id, None) is not None or self._back.pop(page_id, None) is not None

    def first(self) -> int:
        """The page to go next; the order is not empty."""
        while self._heap and self._back.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        queued = next(iter(self._queue), None)
        if queued is None or (self._heap and self._heap[0][0] < self._queue[queued]):
            return self._heap[0][1]
        return queued


class SparsePages:
    """One group's pool, readers and evictable order."""

    def __init__(self, group: int, spec: GroupSpec) -> None:
        self.group, self.spec = group, spec
        self.pool = PagePool(spec.num_pages)
        self.readers: dict[int, int] = {}
        self.places: dict[int, Place] = {}
        self.orders = tuple(_Order() for _ in Rank)
        self._uses: dict[int, Use] = {}
        self._clock = 0
        self.num_evicted = 0
        self.emptied: list[Node] = []  # nodes that lost a page to an eviction; whoever trims paths empties it

    @property
    def num_evictable(self) -> int:
        return sum(map(len, self.orders))

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self.num_evictable

    def is_evictable(self, page_id: int) -> bool:
        return page_id not in self.readers

    def take(self, count: int) -> list[int]:
        """Private pages with one reader; evicts for them. The caller has made sure that they are available."""
        self.evict(count - self.pool.num_free)
        page_ids = unpack(self.pool.take(count))
        for page_id in page_ids:
            self.readers[page_id] = 1
        return page_ids

    def claim(self, page_ids: frozenset[int]) -> None:
        """Take these very pages, which are free, with one reader each."""
        self.pool.claim(page_ids)
        for page_id in sorted(page_ids):
            self.readers[page_id] = 1

    def read(self, page_ids: Iterable[int]) -> None:
        """One more reader for each published page."""
        for page_id in page_ids:
            held = self.readers.get(page_id, 0)
            self.readers[page_id] = held + 1
            if not held:
                self._leave_order(page_id)

    def drop(self, page_ids: Iterable[int], rank: Rank) -> None:
        """One reader less; at none an unpublished page goes free, a published one becomes evictable, just used."""
        freed = []
        for page_id in page_ids:
            held = self.readers[page_id] - 1
            self._clock += 1
            self._uses[page_id] = Use(rank, self._clock)
            if held:
                self.readers[page_id] = held
                continue
            del self.readers[page_id]
            place = self.places.get(page_id)
            if place is None:
                freed.append(page_id)
                del self._uses[page_id]
            else:
                soft = place.holder().soft_until_ms
                self.orders[Rank.SOFT if soft else rank].append(page_id, self._clock)
        if freed:
            self.pool.give(pack(freed))

    def drop_unused(self, page_id: int) -> None:
        """One reader less that was no use: the page takes the place in the order that its last use gave it."""
        held, place = self.readers[page_id], self.places[page_id]  # a ticket's pages stand in the tree
        if held > 1:
            self.readers[page_id] = held - 1
            return
        del self.readers[page_id]
        last = self._uses.setdefault(page_id, Use(Rank.COLD, 0))
        soft = place.holder().soft_until_ms
        self.orders[Rank.SOFT if soft else last.rank].put_back(page_id, last.stamp)

    def publish(self, page_id: int, node: Node, page: int) -> None:
        """Fill the hole at that page number with a page that has readers."""
        at = (page - node.start) * PAGE_ID_BYTES
        node.pages[self.group][at : at + PAGE_ID_BYTES] = pack([page_id])
        node.spilled = min(node.spilled, page - node.start)
        self.places[page_id] = Place(node, page)

    def evict(self, count: int) -> None:
        """Leave holes where the first `count` victims stood."""
        for order in self.orders:
            while order and count > 0:
                self.evict_one(order.first())
                count -= 1

    def evict_one(self, page_id: int) -> None:
        """Leave a hole where this evictable page stood."""
        self._leave_order(page_id)
        place = self.places.pop(page_id)
        del self._uses[page_id]
        node = place.holder()
        at = (place.page - node.start) * PAGE_ID_BYTES
        node.pages[self.group][at : at + PAGE_ID_BYTES] = bytes(PAGE_ID_BYTES)
        self.emptied.append(node)
        self.num_evicted += 1
        self.pool.give(pack([page_id]))

    def discard(self, page_ids: bytes | bytearray) -> int:
        """Free the evictable pages of a run that was cut off the tree; holes are skipped. Answers how many."""
        freed = [page_id for page_id in unpack(page_ids) if page_id]
        for page_id in freed:
            del self.places[page_id]
            del self._uses[page_id]
            self._leave_order(page_id)
        if freed:
            self.num_evicted += len(freed)
            self.pool.give(pack(freed))
        return len(freed)

    def rerank(self, page_ids: Iterable[int], rank: Rank) -> None:
        """Move those that are evictable to the back of another rank."""
        for page_id in page_ids:
            if page_id and page_id not in self.readers:
                self._leave_order(page_id)
                self._clock += 1
                self._uses[page_id] = self._uses[page_id]._replace(stamp=self._clock)
                self.orders[rank].append(page_id, self._clock)

    def _leave_order(self, page_id: int) -> None:
        for order in self.orders:
            if order.remove(page_id):
                return
        raise AssertionError(f"page {page_id} of group {self.group} is in no order")
