"""The order in which snapshots of a STATE group are evicted: by what they are worth. kinds/state.py gives slots out.

Snapshots all take one slot each, and differ in two ways: whether prompts come back to them, and how many tokens a
prompt that does so need not compute. They go in this order:

    COLD          at an interval or at a chunk's end, and never restored: a guess
    WARM, class 0 where a prompt ended or branched, and never restored since it was taken
    WARM, class 1 restored by a later prompt; at most a quarter of the slots, the first of the rest fall to class 0
    SOFT          under a Pin call

Prompts that come once therefore take nothing from those that are reused, as in segmented LRU (Karedla, Love and
Wherry, 1994). Within a class the lowest rank goes first:

    rank = floor + depth        depth: pages before the boundary; floor: the rank of the last snapshot that was evicted

This is the greedy dual rule (Young, 1994): what costs more to compute again stays longer, and ages all the same, since
the floor rises with each eviction. Of two equal ranks the older one goes first.

On 12,031 prompts of the Mooncake conversation trace the tokens that hit, in a model of the pool alone:

    slots                        50     200    1,000   4,000
    by last use              4.40 %  8.11 %  27.50 %  35.27 %
    by depth, one class      5.46 % 14.94 %  30.68 %  35.50 %
    by depth, class 1 <= 1/4 6.81 % 16.05 %  30.23 %  35.43 %
    by depth, class 1 <= 4/5 6.70 % 12.14 %  24.99 %  34.81 %

The share is small because each turn of a conversation restores the snapshot that the next one no longer needs. With the
priority policy the priority decides first.
"""

from __future__ import annotations

from cache_service.core.device.eviction_order import EvictionPolicy
from cache_service.core.device.page_order import PageOrder
from cache_service.core.device.page_pool import unpack
from cache_service.core.device.radix_node import Node
from cache_service.core.device.sparse_pages import Retention, SparsePages
from session.words import GroupSpec

RESTORED_SHARE = 0.25
# A stamp is the rank in its high bits, and the group's clock, which tells equal ranks apart, in the low ones.
_CLOCK_BITS = 40


class SnapshotPages(SparsePages):
    """Odd classes are those of restored snapshots; a class counts twice the priority of its nodes."""

    def __init__(self, group: int, spec: GroupSpec, policy: EvictionPolicy) -> None:
        super().__init__(group, spec, policy)
        self._max_restored = int(RESTORED_SHARE * spec.num_pages)
        self._restored: set[int] = set()
        self._floor = 0

    @property
    def num_cold(self) -> int:
        """Snapshots that the next one to be taken may replace, however little is known of it."""
        order = self._orders.get((Retention.COLD, 0))
        return len(order) if order is not None else 0

    def drop_restored(self, page_id: int) -> None:
        """Ends the reading of a snapshot from which a launch has resumed."""
        self._restored.add(page_id)
        self.drop((page_id,), Retention.WARM)

    def warm(self, page_id: int) -> None:
        """Makes a COLD snapshot WARM: another prompt ends or branches there."""
        if self._order_of.get(page_id) == (Retention.COLD, 0):
            self.read((page_id,))
            self.drop((page_id,), Retention.WARM)

    def _eviction_class(self, page_id: int, node: Node) -> int:
        priority = node.priority if self._policy.has_priorities else 0
        return 2 * priority + (page_id in self._restored)

    def _stamp(self, page_id: int) -> int:
        place = self.places.get(page_id)
        depth = place.page + 1 if place is not None else 0
        return (self._floor + depth << _CLOCK_BITS) + self._clock

    def _append(self, page_id: int, key: tuple[Retention, int]) -> None:
        order = self._order(page_id, key)
        order.put_back(page_id, self._uses[page_id].stamp)
        self._limit(key, order)

    def drop_unused(self, page_id: int) -> None:
        super().drop_unused(page_id)
        key = self._order_of.get(page_id)
        if key is not None:
            self._limit(key, self._orders[key])

    def _limit(self, key: tuple[Retention, int], order: PageOrder) -> None:
        """Restored snapshots beyond their share count as never restored."""
        while key[1] % 2 and len(order) > self._max_restored:
            first, _ = order.first()
            self._leave_order(first)
            self._restored.remove(first)
            self._clock += 1
            use = self._uses[first] = self._uses[first]._replace(eviction_class=key[1] - 1, stamp=self._stamp(first))
            self._order(first, (Retention.WARM, use.eviction_class)).put_back(first, use.stamp)

    def evict(self, count: int) -> None:
        for _ in range(min(count, self.num_evictable)):
            page_id = self._victim()
            if self._order_of[page_id][0] is Retention.WARM:
                self._floor = max(self._floor, self._uses[page_id].stamp >> _CLOCK_BITS)
            self.evict_one(page_id)

    def _victim(self) -> int:
        return self._orders[min(self._orders)].first()[0]

    def evict_one(self, page_id: int) -> None:
        self._restored.discard(page_id)
        super().evict_one(page_id)

    def check(self) -> None:
        assert self._restored <= self.places.keys(), f"group {self.group}: a restored snapshot that stands nowhere"
        for (retention, number), page_ids in self.order().items():
            if retention is not Retention.WARM:
                continue
            restored = self._restored.intersection(page_ids)
            assert len(restored) == (len(page_ids) if number % 2 else 0), f"group {self.group}: class {number}"
            assert len(restored) <= self._max_restored, f"group {self.group}: {len(restored)} restored snapshots"
            stamps = [self._uses[page_id].stamp for page_id in page_ids]
            assert stamps == sorted(stamps), f"group {self.group}: ranks are out of order"

    def discard(self, page_ids: bytes | bytearray) -> int:
        num_freed = super().discard(page_ids)
        self._restored.difference_update(unpack(page_ids))
        return num_freed
