"""Where on a path an evicted run leaves its marks, and how far a prompt finds such a run again.

ghost_table.py keeps the marks, and says what they are hints for.
"""

from __future__ import annotations

from cache_service.core.device.eviction_order import EvictionPolicy
from cache_service.core.device.ghost_table import STRIDE_PAGES, Ghost, GhostKind, GhostTable, mark_of
from cache_service.core.device.radix_node import Node, Root


class RunMarks:
    """The marks of one worker's runs. The policy is told which of them come back."""

    def __init__(self, ghosts: GhostTable, page_key_bytes: int, policy: EvictionPolicy) -> None:
        self._ghosts = ghosts
        self._page_key_bytes = page_key_bytes
        self._policy = policy

    def find(self, root: Root, tokens: bytes, page: int) -> Ghost | None:
        """Returns what is remembered of that page of a prompt; None for nothing."""
        size = self._page_key_bytes
        return self._ghosts.find(mark_of(root.digest, page, tokens[max(page - 1, 0) * size : (page + 1) * size]))

    def leave(self, node: Node, keep: int, kind: GhostKind) -> None:
        """Leaves marks for the pages from `keep` on; the last pages first, so that heads are the newest."""
        size, key, digest, add = self._page_key_bytes, node.key, node.root.digest, self._ghosts.add
        first, end = node.start + keep, node.end
        page = (end - 1) // STRIDE_PAGES * STRIDE_PAGES
        while page > first:
            at = (page - node.start) * size
            add(mark_of(digest, page, bytes(key[at - size : at + size])), kind, end - page)
            end = page
            page -= STRIDE_PAGES
        if keep:
            tokens = bytes(key[(keep - 1) * size : (keep + 1) * size])
        else:
            assert node.parent is not None
            tokens = bytes(node.parent.key[-size:]) + bytes(key[:size])
        add(mark_of(digest, first, tokens), kind, end - first, opens_node=not keep)

    def take(self, parent: Node, tokens: bytes, pos: int, limit: int) -> int:
        """Returns how many pages of tokens[pos:limit] behind `parent` were evicted as one node; removes their marks.

        What was another node becomes one again, so that trunks are older than tails once more. Exact where the tokens
        part from the evicted ones at a multiple of `STRIDE_PAGES`, else too many by fewer pages than that. A lost mark
        ends the run early.
        """
        size, page = self._page_key_bytes, parent.end
        start, end = page, page + (limit - pos) // size
        before = bytes(parent.key[-size:])
        origin = pos - page * size  # where page 0 would stand
        while page < end:
            at = origin + page * size
            mark = mark_of(parent.root.digest, page, before + tokens[at : at + size])
            ghost = self._ghosts.find(mark)
            if ghost is None or ghost.kind is GhostKind.CLEARED or (ghost.opens_node and page > start):
                break
            self._ghosts.take(mark)
            num_pages = min(ghost.num_pages, end - page)
            self._policy.returned(ghost, num_pages)
            page += num_pages
            before = tokens[origin + (page - 1) * size : origin + page * size]
        return page - start
