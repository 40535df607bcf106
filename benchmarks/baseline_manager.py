"""The least that a prefix cache must do for a request: match, pin, evict, allocate, publish, release. For comparisons.

One page size, one group, lru. Left out: groups, leases, namespaces, tickets, hashes, plans, checks, ghosts.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

PAGE_TOKENS = 16
TOKEN_BYTES = PAGE_ID_BYTES = 4
PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES


class Node:
    """A run of pages on one path; `pins` counts its holders and its pinned children."""

    __slots__ = ("children", "key", "pages", "parent", "pins")

    def __init__(self, key: bytes, pages: bytes, parent: Node | None) -> None:
        self.key, self.pages, self.parent = key, pages, parent
        self.children: dict[bytes, Node] = {}
        self.pins = 0


class Walk(NamedTuple):
    """`node` matches wholly up to byte `pos`; behind it `pages` pages of `child`."""

    node: Node
    child: Node | None
    pos: int
    pages: int


class BaselineManager:
    """Pages of 16 tokens, packed tokens and page ids."""

    def __init__(self, num_pages: int) -> None:
        self._free = array("I", range(num_pages))
        self._root = Node(b"", b"", None)
        self._root.pins = 1
        self._evictable: OrderedDict[Node, None] = OrderedDict()  # unpinned leaves, oldest first

    def request(self, prompt: bytes, output: bytes) -> int:
        """A whole request, whose last output token has no KV. Returns the cached tokens."""
        first, cached, pages = self._acquire(prompt, len(prompt) + len(output))
        node, pages = self._publish(first, cached, prompt, pages)
        last = node
        if len(output) > TOKEN_BYTES:
            whole = len(prompt) // PAGE_BYTES * PAGE_BYTES
            last, pages = self._publish(node, whole, prompt + output[:-TOKEN_BYTES], pages)
        for held in dict.fromkeys((first, node, last)):
            self._unpin(held)
        self._free.frombytes(pages)
        return cached // TOKEN_BYTES

    def _acquire(self, tokens: bytes, num_bytes: int) -> tuple[Node, int, bytes]:
        """Returns the pinned node, the matched bytes, and pages for the rest of `num_bytes` of tokens."""
        walk = self._walk(self._root, 0, tokens, (len(tokens) - TOKEN_BYTES) // PAGE_BYTES * PAGE_BYTES)
        node, pos = self._end_of(walk)
        self._pin(node)
        need = -(-num_bytes // PAGE_BYTES) - pos // PAGE_BYTES
        self._evict(need - len(self._free))
        left = len(self._free) - need
        pages = self._free[left:].tobytes()
        del self._free[left:]
        return node, pos, pages

    def _publish(self, node: Node, start: int, tokens: bytes, pages: bytes) -> tuple[Node, bytes]:
        """Makes tokens[start:] findable behind `node`. Returns the pinned node at their end, and the pages left."""
        end = len(tokens) // PAGE_BYTES * PAGE_BYTES
        node, pos = self._end_of(self._walk(node, start, tokens, end))
        if pos > start:  # published by another request meanwhile: the own copies go free
            used = (pos - start) // PAGE_BYTES * PAGE_ID_BYTES
            self._free.frombytes(pages[:used])
            pages = pages[used:]
            self._pin(node)
        if pos >= end:
            return node, pages
        used = (end - pos) // PAGE_BYTES * PAGE_ID_BYTES
        leaf = Node(tokens[pos:end], pages[:used], node)
        node.children[tokens[pos : pos + PAGE_BYTES]] = leaf
        self._pin(leaf)
        return leaf, pages[used:]

    def _walk(self, node: Node, pos: int, tokens: bytes, limit: int) -> Walk:
        while pos < limit:
            child = node.children.get(tokens[pos : pos + PAGE_BYTES])
            if child is None:
                break
            if tokens.startswith(child.key, pos) and pos + len(child.key) <= limit:
                pos += len(child.key)
                node = child
                continue
            low, high = 1, min(len(child.key), limit - pos) // PAGE_BYTES
            while low < high:
                middle = (low + high + 1) // 2
                if tokens.startswith(child.key[: middle * PAGE_BYTES], pos):
                    low = middle
                else:
                    high = middle - 1
            return Walk(node, child, pos, low)
        return Walk(node, None, pos, 0)

    def _end_of(self, walk: Walk) -> tuple[Node, int]:
        """The node that ends where the walk ends; a child that matches in part is split there."""
        node, child, pos, pages = walk
        if child is None:
            return node, pos
        at = pages * PAGE_BYTES
        top = Node(child.key[:at], child.pages[: pages * PAGE_ID_BYTES], node)
        node.children[top.key[:PAGE_BYTES]] = top
        child.key, child.pages, child.parent = child.key[at:], child.pages[pages * PAGE_ID_BYTES :], top
        top.children[child.key[:PAGE_BYTES]] = child
        top.pins = 1 if child.pins else 0
        return top, pos + at

    def _pin(self, node: Node | None) -> None:
        while node is not None:
            node.pins += 1
            if node.pins > 1:
                return
            self._evictable.pop(node, None)
            node = node.parent

    def _unpin(self, node: Node) -> None:
        while node.parent is not None:
            node.pins -= 1
            if node.pins:
                return
            if not node.children:
                self._evictable[node] = None
            node = node.parent

    def _evict(self, num_pages: int) -> None:
        """Cuts the tails of the oldest leaves; a leaf that keeps pages keeps its place."""
        while num_pages > 0:
            node, _ = self._evictable.popitem(last=False)
            held = len(node.pages) // PAGE_ID_BYTES
            if held > num_pages:
                self._free.frombytes(node.pages[-num_pages * PAGE_ID_BYTES :])
                node.pages = node.pages[: -num_pages * PAGE_ID_BYTES]
                node.key = node.key[: -num_pages * PAGE_BYTES]
                self._evictable[node] = None
                self._evictable.move_to_end(node, last=False)
                return
            self._free.frombytes(node.pages)
            num_pages -= held
            parent = node.parent
            assert parent is not None
            del parent.children[node.key[:PAGE_BYTES]]
            if not parent.children and not parent.pins:
                self._evictable[parent] = None
