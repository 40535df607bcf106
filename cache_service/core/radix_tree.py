"""Page-aligned runs of tokens -> pages of every group; walk, pin, grow, attach, split, cut.

Knows no pool, lease, ticket or time. A node is a run of pages on one path. Its tokens may reach beyond its pages: what
follows the resident pages are ghosts, tokens of evicted pages that are remembered for a while:

    key       |  page  |  page  |  page  | ghost | ghost |
    pages[g]  |   17   |    4   |    9   |                     `resident` = 3

Laws: a pinned node has no ghost; below a ghost everything is ghost; the lower half of a split keeps its identity;
a node counts its own pins and its pinned children, so a pin walks up only to the first pinned ancestor.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from typing import NamedTuple

from cache_service.core.eviction import LeafOrder
from cache_service.core.page_hash import page_hashes
from cache_service.core.radix_node import Node, Packed, Root
from cache_service.core.types import HASH_BYTES, PAGE_ID_BYTES, TOKEN_BYTES, Namespace

# A divergence inside a node is searched for by strides of pages, then by halves.
_FIRST_PAGES = 16
_MOST_PAGES = 256


def _head(packed: Packed, at: int) -> Packed:
    """What lies before `at`; in place where that saves a copy."""
    if isinstance(packed, bytes):
        return packed[:at]
    del packed[at:]
    return packed


def _tail(packed: Packed, at: int) -> Packed:
    """What lies from `at` on; in place where that saves a copy."""
    if isinstance(packed, bytes):
        return packed[at:]
    del packed[:at]
    return packed


class Walk(NamedTuple):
    """How far tokens lead: `node` wholly, then `pages` resident pages of `child`; `ghost`: the next page is one."""

    node: Node
    child: Node | None
    pages: int
    ghost: bool

    @property
    def end(self) -> int:
        return self.node.end + self.pages


class RadixTree:
    """All namespaces of one worker."""

    def __init__(self, page_tokens: int, num_groups: int, policy: LeafOrder, ghost_limit: int) -> None:
        self.page_bytes = page_tokens * TOKEN_BYTES
        self.policy = policy
        self.roots: dict[Namespace, Root] = {}
        self.num_nodes = 0
        self.evictable_pages = 0  # pages of unpinned nodes
        self.ghost_pages = 0
        self.ghosts: OrderedDict[Node, None] = OrderedDict()  # nodes with ghosts, oldest first
        self._clock = 0
        self._num_groups = num_groups
        self._ghost_limit = ghost_limit

    def root(self, namespace: Namespace) -> Root:
        """The namespace's root, made on first use; dropped again when nothing hangs on it."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace, self._num_groups)
        return root

    # Reading.

    def walk(self, node: Node, tokens: bytes, pos: int, limit: int) -> Walk:
        """Follow tokens[pos:limit], a whole number of pages, down from `node`."""
        size = self.page_bytes
        while pos < limit:
            child = node.children.get(tokens[pos : pos + size])
            if child is None:
                break
            key = child.key
            if child.resident * size == len(key) <= limit - pos and tokens.startswith(key, pos):
                pos += len(key)
                node = child
                continue
            # One page beyond the resident ones says whether ghosts go on; how far does not matter here.
            held = child.resident
            pages = self.common_pages(child, tokens, pos, min(limit, pos + (held + 1) * size))
            return Walk(node, child, min(pages, held), pages > held)
        return Walk(node, None, 0, False)

    def common_pages(self, node: Node, tokens: bytes, pos: int, limit: int) -> int:
        """Leading pages of the node, ghosts included, that tokens[pos:limit] share; the first one is known to match."""
        size, key = self.page_bytes, memoryview(node.key)
        end = min(len(key), limit - pos)
        low = high = size
        step = _FIRST_PAGES * size
        while low < end:  # most prompts part early, so look near first, then in growing strides
            high = min(low + step, end)
            if not tokens.startswith(key[low:high], pos + low):
                break
            low = high
            step = min(step * 4, _MOST_PAGES * size)
        if low == end:
            return end // size
        while high - low > size:
            middle = low + (high - low) // size // 2 * size
            if tokens.startswith(key[low:middle], pos + low):
                low = middle
            else:
                high = middle
        return low // size

    def path(self, node: Node) -> list[Node]:
        """From the first node below the root down to `node`."""
        nodes = []
        step: Node | None = node
        while step is not None and step.parent is not None:
            nodes.append(step)
            step = step.parent
        nodes.reverse()
        return nodes

    def ensure_hashes(self, node: Node) -> None:
        """Fill in the missing hashes of the path down to `node`: a pure function of the namespace and the path."""
        lacking = []
        step = node
        while step.parent is not None and len(step.hashes) < step.resident * HASH_BYTES:
            lacking.append(step)
            step = step.parent
        size = self.page_bytes
        for step in reversed(lacking):
            have = len(step.hashes)
            parent = step.hashes[-HASH_BYTES:] if have else step.parent.hashes[-HASH_BYTES:]  # type: ignore[union-attr]
            tokens = step.key[have // HASH_BYTES * size : step.resident * size]
            step.hashes += page_hashes(step.root.digest, bytes(parent), tokens, size)

    # Pinning.

    def pin(self, node: Node | None) -> None:
        while node is not None:
            node.pins += 1
            if node.pins > 1:
                return
            self.evictable_pages -= node.resident
            if node.queue is not None:
                self.policy.remove(node)
            node = node.parent

    def unpin(self, node: Node | None) -> None:
        """Let go of a node; everything that becomes unpinned counts as just used."""
        self._clock += 1
        while node is not None:
            node.pins -= 1
            node.stamp = self._clock
            if node.pins:
                if node.parent is None:
                    self._drop_if_empty(node.root)
                return
            self.evictable_pages += node.resident
            if not node.live_children and node.resident:
                self.policy.add(node)
            node = node.parent

    def hand_down(self, node: Node, child: Node) -> bool:
        """Pin an unpinned child in place of its parent, whose count stays: it loses a pin and gains a pinned child."""
        if child.parent is not node or child.pins:
            return False
        child.pins = 1
        self.evictable_pages -= child.resident
        if child.queue is not None:
            self.policy.remove(child)
        self._clock += 1
        node.stamp = self._clock
        return True

    def unpin_unused(self, node: Node) -> None:
        """Let go of a node that was held but not used: its place in the order is the one that its last use gave it."""
        stamp = node.stamp
        self.unpin(node)
        node.stamp = stamp
        queue = node.queue
        if queue is None:
            return
        newer = list(takewhile(lambda other: other.stamp > stamp or other is node, reversed(queue)))
        for other in reversed(newer):
            if other is not node:
                queue.move_to_end(other)

    def _drop_if_empty(self, root: Root) -> None:
        if not root.children and root.pins == 1 and self.roots.get(root.namespace) is root:
            del self.roots[root.namespace]

    # Changing the shape. New and revived nodes are unpinned and outside the order: the caller pins them next.

    def grow(self, node: Node, tokens: Packed, pages: list[bytearray], count: int) -> None:
        """Extend a childless pinned node in place."""
        if isinstance(node.key, bytes):
            node.key = bytearray(node.key)
        node.key += tokens
        for held, more in zip(node.pages, pages, strict=True):
            held += more
        node.resident += count

    def attach(self, parent: Node, key: Packed, pages: list[bytearray], count: int) -> Node:
        """A new leaf behind the wholly resident `parent`."""
        leaf = Node(parent, parent.end, key, pages, count)
        parent.children[bytes(key[: self.page_bytes])] = leaf
        parent.live_children += 1
        self.num_nodes += 1
        self.evictable_pages += count
        return leaf

    def revive(self, ghost: Node, pages: list[bytearray], count: int) -> Node:
        """Give the first `count` pages of a node that is all ghost their pages again."""
        node = self.split(ghost, count) if count * self.page_bytes < len(ghost.key) else ghost
        node.pages = pages
        node.resident = count
        node.uses = 1  # policies take a ghost's return as a use
        assert node.parent is not None
        node.parent.live_children += 1
        self.evictable_pages += count
        self.ghost_pages -= count
        if node is ghost:
            del self.ghosts[ghost]
        return node

    def split(self, node: Node, count: int) -> Node:
        """Cut a node in two; answers the new upper half of `count` pages. `node` stays the lower half."""
        assert node.parent is not None
        parent, at = node.parent, count * self.page_bytes
        live = count <= node.resident
        requeue = node.queue is not None and count == node.resident
        if requeue:  # only ghosts are left below: the upper half becomes the leaf
            self.policy.remove(node)
        elif node.queue is not None:
            self.policy.shrunk(node, count)
        top = Node(parent, node.start, bytes(memoryview(node.key)[:at]), [], 0)
        top.pages = [pages[: count * PAGE_ID_BYTES] for pages in node.pages]
        top.resident = count if live else 0
        parent.children[top.key[: self.page_bytes]] = top  # type: ignore[index]
        node.key, node.parent, node.start = _tail(node.key, at), top, node.start + count
        node.pages = [pages[count * PAGE_ID_BYTES :] for pages in node.pages]
        node.resident -= top.resident
        top.hashes, node.hashes = node.hashes[: count * HASH_BYTES], node.hashes[count * HASH_BYTES :]
        top.spilled, node.spilled = min(node.spilled, count), max(node.spilled - count, 0)
        top.uses, top.priority, top.soft_until_ms = node.uses, node.priority, node.soft_until_ms
        top.stamp = node.stamp
        top.children[bytes(node.key[: self.page_bytes])] = node
        top.pins = 1 if node.pins else 0
        top.live_children = 1 if node.resident else 0
        self.num_nodes += 1
        if requeue:
            self.policy.add(top)
        return top

    def cut(self, node: Node, count: int) -> list[bytearray]:
        """Take the last `count` resident pages off an unpinned leaf; answers them, group by group."""
        removed = node.pages
        if count == node.resident:
            node.pages = [bytearray() for _ in removed]
            node.hashes.clear()
            self._empty(node)
        else:
            removed = self._shorten(node, node.resident - count)
        self.evictable_pages -= count
        # The pages become ghosts; beyond the limit the oldest are forgotten.
        self.ghosts.setdefault(node)
        self.ghost_pages += count
        while self.ghost_pages > self._ghost_limit:
            self.forget(next(iter(self.ghosts)))
        return removed

    def _shorten(self, node: Node, keep: int) -> list[bytearray]:
        at = keep * PAGE_ID_BYTES
        removed = []
        for pages in node.pages:
            removed.append(pages[at:])
            del pages[at:]
        if node.queue is not None:
            self.policy.shrunk(node, node.resident - keep)
        node.resident = keep
        if node.hashes:
            del node.hashes[keep * HASH_BYTES :]
        if node.spilled > keep:
            node.spilled = keep
        return removed

    def _empty(self, node: Node) -> None:
        """The node loses its last page; a parent that becomes a leaf by this ranks as just used."""
        if node.queue is not None:
            self.policy.remove(node)
        node.resident = node.spilled = 0
        parent = node.parent
        assert parent is not None
        parent.live_children -= 1
        if not parent.live_children and not parent.pins and parent.resident:
            self._clock += 1
            parent.stamp = self._clock
            self.policy.add(parent)

    # Ghosts. A child became a ghost no later than its parent, so forgetting the oldest first never orphans a node.

    def forget(self, node: Node) -> None:
        """Forget the ghosts of a node whose children have none left."""
        del self.ghosts[node]
        size = self.page_bytes
        self.ghost_pages -= len(node.key) // size - node.resident
        if node.resident:
            node.key = _head(node.key, node.resident * size)
        else:
            self._detach(node)

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not node.children
        del parent.children[bytes(node.key[: self.page_bytes])]
        self.num_nodes -= 1
        if parent.parent is None:
            self._drop_if_empty(parent.root)
