"""Which nodes may be evicted now: leaves that no lease pins, of which no ticket copies pages.

Pages of FULL groups go with their node. Pages of WINDOW and STATE groups go one by one, once nobody reads them:
sparse_pages.py. In which order they go: eviction_order.py, window_order.py, snapshot_order.py.

A node counts its own pins and its pinned children, so a pin walks up only to the first pinned ancestor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from cache_service.core.device.eviction_order import EvictionPolicy
from cache_service.core.device.radix_node import Node, Root


class EvictableNodes(ABC):
    """The pins of a tree's nodes. The policy has the leaves that no lease holds in its order."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.evictable_pages = 0  # pages of unpinned nodes
        self.now_ms = 0  # of the last step or tick

    @abstractmethod
    def _drop_if_empty(self, root: Root) -> None:
        """Takes out a root that has no child and no pin but its own."""

    def pin(self, node: Node | None) -> None:
        while node is not None:
            node.pins += 1
            if node.queue is not None:
                self.policy.remove(node)
            if node.pins > 1:
                return
            self.evictable_pages -= node.resident
            node = node.parent

    def pin_for_ticket(self, node: Node) -> None:
        """Holds a node without using it: a leaf keeps its place in the order, where victims pass it over."""
        node.ticket_pins += 1
        node.pins += 1
        if node.pins == 1:
            self.evictable_pages -= node.resident
            self.pin(node.parent)

    def unpin_for_ticket(self, node: Node) -> None:
        node.ticket_pins -= 1
        node.pins -= 1
        if not node.pins:
            self.evictable_pages += node.resident
            self._let_go(node.parent, node.used_ms)

    def unpin(self, node: Node) -> None:
        """Unpins a node; what becomes unpinned by that counts as just used."""
        self._let_go(node, self.now_ms)

    def _let_go(self, node: Node | None, used_ms: int) -> None:
        """Removes a pin and notes the last use, also where the node stays pinned: its last pin may be a ticket's."""
        while node is not None:
            node.pins -= 1
            if node.used_ms < used_ms:
                node.used_ms = used_ms
            else:
                used_ms = node.used_ms
            if not node.children:
                self._queue_leaf(node)
            if node.pins:
                if node.parent is None:
                    self._drop_if_empty(node.root)
                return
            self.evictable_pages += node.resident
            node = node.parent

    def _queue_leaf(self, node: Node) -> None:
        """Puts a leaf that no lease holds into the order, as just used; tickets do not count as holders."""
        if node.pins == node.ticket_pins and node.queue is None and node.resident and not node.children:
            self.policy.add(node)

    def hand_down(self, node: Node, child: Node) -> bool:
        """Pins an unpinned child in place of its parent, whose count stays: it loses a pin and gains a pinned child."""
        if child.parent is not node or child.pins:
            return False
        child.pins = 1
        self.evictable_pages -= child.resident
        if child.queue is not None:
            self.policy.remove(child)
        return True
