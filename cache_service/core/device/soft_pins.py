"""Prefixes under a Pin call: which nodes, how many pages, and which pins have run out.

A node without pages leaves, so no more nodes are kept here than are cached.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from cache_service.core.device.radix_node import Node


class SoftPins:
    """Nodes whose `soft_until_ms` is set; a tick looks only at those that are due."""

    def __init__(self) -> None:
        self.num_pages = 0
        self._nodes: set[Node] = set()
        self._heap: list[tuple[int, int, Node]] = []  # (until, number, node); also of nodes that have left
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def set(self, node: Node, until_ms: int) -> None:
        """Pins a resident node, or pins it for another time."""
        if node not in self._nodes:
            self._nodes.add(node)
            self.num_pages += node.resident
        node.soft_until_ms = until_ms
        self._push(node)
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._heap = [(node.soft_until_ms, next(self._numbers), node) for node in self._nodes]
            heapify(self._heap)

    def _push(self, node: Node) -> None:
        heappush(self._heap, (node.soft_until_ms, next(self._numbers), node))

    def drop(self, node: Node) -> None:
        if node in self._nodes:
            self._nodes.remove(node)
            self.num_pages -= node.resident
        node.soft_until_ms = 0

    def was_split(self, top: Node, node: Node) -> None:
        """The upper half of a pinned node is pinned as the lower half is."""
        if node in self._nodes:
            self._nodes.add(top)
            self._push(top)

    def shrunk(self, node: Node, num_pages: int) -> None:
        """The node is about to lose its last `num_pages` pages; with its last page goes the pin."""
        if node in self._nodes:
            self.num_pages -= num_pages
            if num_pages == node.resident:
                self._nodes.remove(node)
                node.soft_until_ms = 0

    def due(self, now_ms: int) -> list[Node]:
        """Returns the nodes whose pin has run out; they are still pinned."""
        found = []
        while self._heap and self._heap[0][0] <= now_ms:
            until_ms, _, node = heappop(self._heap)
            if node in self._nodes and node.soft_until_ms == until_ms:
                found.append(node)
        return found
