"""The order in which pages of a WINDOW group are evicted.

    COLD          left behind by a running window: oldest first
    WARM          before a prompt's end or a branch: by the policy's class of the node in which they stand. The policy
                  names the class that loses its oldest page next
    SOFT          under a Pin call

Classes above 0 keep at most the policy's `protected_share` of the group; the oldest of the rest fall to class 0.
"""

from __future__ import annotations

from cache_service.core.device.eviction_order import EvictionPolicy
from cache_service.core.device.radix_node import Node
from cache_service.core.device.sparse_pages import Retention, SparsePages, Use
from session.words import GroupSpec


class WindowPages(SparsePages):
    """`policy` orders the nodes in which WARM pages stand."""

    def __init__(self, group: int, spec: GroupSpec, policy: EvictionPolicy) -> None:
        super().__init__(group, spec, policy)
        self._max_protected = int(policy.protected_share * spec.num_pages)

    def _eviction_class(self, page_id: int, node: Node) -> int:
        return self._policy.eviction_class(node)

    def _stamp(self, page_id: int) -> int:
        return self._clock

    def _append(self, page_id: int, key: tuple[Retention, int]) -> None:
        order = self._order(page_id, key)
        order.append(page_id, self._clock)
        while key[1] and len(order) > self._max_protected:
            oldest, _ = order.first()
            self._leave_order(oldest)
            self._clock += 1
            self._uses[oldest] = Use(Retention.WARM, 0, self._clock)
            self._order(oldest, (Retention.WARM, 0)).append(oldest, self._clock)

    def _victim(self) -> int:
        retention = min(key[0] for key in self._orders)
        heads = {key[1]: order.first() for key, order in self._orders.items() if key[0] is retention}
        if len(heads) > 1:
            number = self._policy.next_class({number: self._clock - stamp for number, (_, stamp) in heads.items()})
            return heads[number][0]
        return next(iter(heads.values()))[0]
