"""Page-aligned runs of tokens -> pages of every group; walk, grow, attach, split, cut.

Frees no page itself. Which nodes may be evicted is decided by their pins, in evictable.py. A node is a run of pages on
one path:

    key       |  page  |  page  |  page  |
    pages[g]  |   17   |    4   |    9   |      `resident` = 3

Laws: the lower half of a split keeps its identity; a node without pages leaves the tree, and leaves a mark among the
ghosts.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache_service.core.base.page_hash import page_hashes
from cache_service.core.device.evictable import EvictableNodes
from cache_service.core.device.eviction_order import EvictionPolicy
from cache_service.core.device.ghost_table import GhostKind, GhostTable
from cache_service.core.device.radix_node import Node, Packed, Root
from cache_service.core.device.run_marks import RunMarks
from cache_service.core.device.soft_pins import SoftPins
from session.words import HASH_BYTES, PAGE_ID_BYTES, TOKEN_BYTES, Namespace

# A divergence inside a node is searched for by strides of pages, then by halves.
_FIRST_PAGES = 16
_MOST_PAGES = 256


def _tail(packed: Packed, at: int) -> Packed:
    """Returns what lies from `at` on; in place where that saves a copy."""
    if isinstance(packed, bytes):
        return packed[at:]
    del packed[:at]
    return packed


@dataclass(slots=True)
class Walk:
    """How far tokens match: all of `node`, then `pages` pages of `child`."""

    node: Node
    child: Node | None
    pages: int

    @property
    def end(self) -> int:
        return self.node.end + self.pages


class RadixTree(EvictableNodes):
    """All namespaces of one worker."""

    def __init__(self, page_tokens: int, num_groups: int, policy: EvictionPolicy, ghosts: GhostTable) -> None:
        super().__init__(policy)
        self.page_key_bytes = page_tokens * TOKEN_BYTES
        self.roots: dict[Namespace, Root] = {}
        self.num_nodes = 0
        self.ghosts = ghosts
        self.run_marks = RunMarks(ghosts, self.page_key_bytes, policy)
        self.soft_pins = SoftPins()
        self.detached: dict[Root, bool] = {}
        self._num_groups = num_groups

    def root(self, namespace: Namespace) -> Root:
        """The namespace's root, made on first use; dropped again when it has no child."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace, self._num_groups)
        return root

    # Clearing. A detached namespace is no longer found; its pages are still evictable until they are cut.

    def roots_of(self, namespace: Namespace | None) -> list[Root]:
        """Returns the roots in scope (None: all)."""
        return [root for name, root in self.roots.items() if namespace in (None, name)]

    def detach(self, root: Root, *, told: bool) -> None:
        """Takes out a root of which nothing is held. `told`: watchers were told that all of it is gone."""
        del self.roots[root.namespace]
        self.detached[root] = told

    def forget_detached(self, root: Root) -> None:
        self.detached.pop(root, None)

    # Reading.

    def walk(self, node: Node, tokens: bytes, pos: int, limit: int) -> Walk:
        """Returns how far tokens[pos:limit], a whole number of pages, match below `node`."""
        size = self.page_key_bytes
        while pos < limit:
            child = node.children.get(tokens[pos : pos + size])
            if child is None:
                break
            key = child.key
            if len(key) <= limit - pos and tokens.startswith(key, pos):
                pos += len(key)
                node = child
                continue
            return Walk(node, child, self.common_pages(child, tokens, pos, limit))
        return Walk(node, None, 0)

    def common_pages(self, node: Node, tokens: bytes, pos: int, limit: int) -> int:
        """Returns how many leading pages of the node tokens[pos:limit] have; the first one is known to match."""
        size, key = self.page_key_bytes, memoryview(node.key)
        end = min(len(key), limit - pos)
        if tokens.startswith(key[:end], pos):  # a prompt that was asked before, but for its last page
            return end // size
        low = high = size
        step = _FIRST_PAGES * size
        while True:  # most others part early, so look near first, then in growing strides
            high = min(low + step, end)
            if not tokens.startswith(key[low:high], pos + low):
                break
            low = high
            step = min(step * 4, _MOST_PAGES * size)
        while high - low > size:
            middle = low + (high - low) // size // 2 * size
            if tokens.startswith(key[low:middle], pos + low):
                low = middle
            else:
                high = middle
        return low // size

    def path(self, node: Node) -> list[Node]:
        """Returns the nodes from the first one below the root down to `node`."""
        nodes = []
        step: Node | None = node
        while step is not None and step.parent is not None:
            nodes.append(step)
            step = step.parent
        nodes.reverse()
        return nodes

    def node_at(self, walk: Walk) -> Node:
        """Returns the node that ends where the walk does; a node that the walk enters only in part is split there."""
        return self.split(walk.child, walk.pages) if walk.child is not None and walk.pages else walk.node

    def ensure_hashes(self, node: Node) -> None:
        """Computes the missing hashes of the path down to `node`."""
        lacking = []
        step = node
        while step.parent is not None and len(step.hashes) < step.resident * HASH_BYTES:
            lacking.append(step)
            step = step.parent
        size = self.page_key_bytes
        for step in reversed(lacking):
            have = len(step.hashes)
            parent = step.hashes[-HASH_BYTES:] if have else step.parent.hashes[-HASH_BYTES:]  # type: ignore[union-attr]
            tokens = step.key[have // HASH_BYTES * size : step.resident * size]
            step.hashes += page_hashes(step.root.digest, bytes(parent), tokens, size)

    def _drop_if_empty(self, root: Root) -> None:
        if not root.children and root.pins == 1 and self.roots.get(root.namespace) is root:
            del self.roots[root.namespace]

    # Changing the shape. A new node is unpinned and outside the order: the caller pins it next.

    def grow(self, node: Node, tokens: Packed, pages: list[bytearray], count: int) -> None:
        """Extends a childless pinned node in place."""
        if isinstance(node.key, bytes):
            node.key = bytearray(node.key)
        node.key += tokens
        for group, more in enumerate(pages):
            node.pages[group] += more
        node.resident += count
        self.policy.grown(node, count)

    def attach(self, parent: Node, key: Packed, pages: list[bytearray], count: int) -> Node:
        """Returns a new leaf behind `parent`."""
        leaf = Node(parent, parent.start + parent.resident, key, pages, count)
        parent.children[bytes(key[: self.page_key_bytes])] = leaf
        self.num_nodes += 1
        self.evictable_pages += count
        return leaf

    def split(self, node: Node, count: int) -> Node:
        """Cuts a node in two. Returns the new upper half of `count` pages. `node` stays the lower half."""
        assert node.parent is not None
        parent, at = node.parent, count * self.page_key_bytes
        if node.queue is not None:
            self.policy.shrunk(node, count)
        top = Node(parent, node.start, bytes(memoryview(node.key)[:at]), [], 0)
        top.pages = [pages[: count * PAGE_ID_BYTES] for pages in node.pages]
        top.resident = count
        parent.children[top.key[: self.page_key_bytes]] = top  # type: ignore[index]
        node.key, node.parent, node.start = _tail(node.key, at), top, node.start + count
        node.pages = [pages[count * PAGE_ID_BYTES :] for pages in node.pages]
        node.resident -= count
        top.hashes, node.hashes = node.hashes[: count * HASH_BYTES], node.hashes[count * HASH_BYTES :]
        top.spilled, node.spilled = min(node.spilled, count), max(node.spilled - count, 0)
        top.uses, top.priority, top.soft_until_ms = node.uses, node.priority, node.soft_until_ms
        top.used_at, top.used_ms = node.used_at, node.used_ms
        top.renewed_ms = node.renewed_ms
        top.children[bytes(node.key[: self.page_key_bytes])] = node
        top.pins = 1 if node.pins else 0
        self.num_nodes += 1
        self.soft_pins.was_split(top, node)
        return top

    def cut(self, node: Node, count: int, is_cleared: bool = False) -> list[bytearray]:
        """Takes the last `count` pages off an unpinned leaf and leaves ghosts. Returns the pages, group by group."""
        kind = GhostKind.AGAIN if node.uses else GhostKind.ONCE
        if is_cleared or (self.detached and node.root in self.detached):
            kind = GhostKind.CLEARED
        keep = node.resident - count
        self.run_marks.leave(node, keep, kind)
        self.evictable_pages -= count
        if not keep:
            return self._detach(node)
        at = keep * PAGE_ID_BYTES
        removed = []
        for pages in node.pages:
            removed.append(pages[at:])
            del pages[at:]
        if node.queue is not None:
            self.policy.shrunk(node, count)
        if isinstance(node.key, bytes):
            node.key = node.key[: keep * self.page_key_bytes]
        else:
            del node.key[keep * self.page_key_bytes :]  # in place: no copy
        node.resident = keep
        if node.hashes:
            del node.hashes[keep * HASH_BYTES :]
        if node.spilled > keep:
            node.spilled = keep
        return removed

    def _detach(self, node: Node) -> list[bytearray]:
        """Takes the node out of the tree; a parent that becomes a leaf by this counts as just used."""
        parent = node.parent
        assert parent is not None and not node.children
        if node.queue is not None:
            self.policy.remove(node)
        del parent.children[bytes(node.key[: self.page_key_bytes])]
        removed, node.pages = node.pages, []
        node.hashes.clear()
        node.resident = node.spilled = 0
        self.num_nodes -= 1
        if not parent.children:
            if parent.parent is None:
                self._drop_if_empty(parent.root)
            else:
                self._queue_leaf(parent)
        return removed
