"""WINDOW(w): pages behind the window may go. A sequence resumes at b when the w - 1 tokens before b are resident."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cache_service.core.device.eviction_order import EvictionPolicy
from cache_service.core.device.lease_table import Lease
from cache_service.core.device.page_pool import pack, unpack
from cache_service.core.device.radix_node import Node, Packed
from cache_service.core.device.sparse_pages import Retention
from cache_service.core.device.window_order import WindowPages
from cache_service.core.kinds.full import leading
from cache_service.core.kinds.group import pages_of
from cache_service.core.kinds.sparse_group import SparseGroup
from session.errors import InvalidInput
from session.messages import Acquire, Adopt
from session.words import PAGE_ID_BYTES, TOKEN_BYTES, GroupPages, GroupSpec, MissReason


@dataclass(slots=True)
class WindowNeed:
    """Page numbers first .. end - 1: `hits` by page number are read, the others are taken fresh."""

    first: int
    end: int
    hits: dict[int, int]

    @property
    def fresh(self) -> int:
        return self.end - self.first - len(self.hits)


@dataclass(slots=True)
class WindowHold:
    """Pages that the lease reads: page numbers `first` and on, without holes."""

    first: int
    page_ids: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.page_ids)


class WindowGroup(SparseGroup):
    miss_reason: ClassVar[MissReason] = MissReason.WINDOW_GONE

    def __init__(self, number: int, spec: GroupSpec, page_tokens: int, policy: EvictionPolicy) -> None:
        super().__init__(number, spec, page_tokens, WindowPages(number, spec, policy))

    def resume(self, resident: bytes, limit: int) -> int:
        run = self.reach_pages()
        if run == 0:
            return limit
        limit = min(limit, len(resident))
        start = resident.rfind(b"\1" * run, 0, limit)
        if start >= 0:
            return start + run
        # No whole run: only a boundary so near the start that the window begins at token 0.
        return min(leading(resident, limit), run - 1)

    def reach_pages(self) -> int:
        return pages_of(self.spec.window_tokens - 1, self.page_tokens)

    def first_page(self, boundary_tokens: int) -> int:
        """Returns the first page that a launch from `boundary_tokens` on still reads."""
        return max(0, boundary_tokens - (self.spec.window_tokens - 1)) // self.page_tokens

    def fetch_bytes(self, matched: int, boundary: int) -> int:
        return (boundary - self.first_page(boundary * self.page_tokens)) * self.spec.page_bytes

    def never_fits(self, num_tokens: int, chunk_tokens: int, reserve_pages: int) -> str | None:
        """The first chunk is held at once; pages behind the window go before the next one."""
        pages, spec = pages_of(min(num_tokens, chunk_tokens or num_tokens), self.page_tokens), self.spec
        if pages <= spec.num_pages:
            return None
        return f"the first chunk takes {pages} pages; group {spec.name} has {spec.num_pages}"

    def need(self, page_ids: bytes, boundary: int, acquire: Acquire) -> WindowNeed:
        """Returns the pages of the window before the boundary, and of the first chunk."""
        start, num_tokens = boundary * self.page_tokens, len(acquire.tokens) // TOKEN_BYTES
        end = pages_of(min(num_tokens, start + (acquire.chunk_tokens or num_tokens)), self.page_tokens)
        first = self.first_page(start)
        ids = unpack(page_ids[first * PAGE_ID_BYTES : boundary * PAGE_ID_BYTES])
        return WindowNeed(first, end, {page: page_id for page, page_id in enumerate(ids, first) if page_id})

    def lacks(self, needs: dict[int, Any], num_pages: int) -> bool:
        need: WindowNeed = needs[self.number]
        hits = sum(map(self.pages.is_unread, need.hits.values()))
        return self.pages.num_available - hits < need.fresh

    def never_holds(self, need: WindowNeed) -> bool:
        return need.end - need.first > self.spec.num_pages

    def take(self, lease: Lease, needs: dict[int, Any], num_pages: int) -> None:
        need: WindowNeed = needs[self.number]
        self.pages.read(need.hits.values())
        fresh = iter(self.pages.take(need.fresh))
        ids = [need.hits.get(page) or next(fresh) for page in range(need.first, need.end)]
        lease.holds[self.number] = WindowHold(need.first, ids)

    def targets(self, lease: Lease, needs: dict[int, Any], boundary: int) -> GroupPages:
        need: WindowNeed = needs[self.number]
        ids = enumerate(lease.holds[self.number].page_ids[: boundary - need.first], need.first)
        return GroupPages(self.number, need.first, pack(0 if page in need.hits else page_id for page, page_id in ids))

    def table(self, lease: Lease) -> GroupPages:
        """Returns the pages of the window, NO_PAGE before it."""
        hold: WindowHold = lease.holds[self.number]
        return GroupPages(self.number, 0, bytes(hold.first * PAGE_ID_BYTES) + pack(hold.page_ids))

    def more(self, lease: Lease, total: int) -> WindowNeed:
        end = self.end(lease)
        return WindowNeed(end, max(end, total), {})

    def never_extends(self, lease: Lease, total: int) -> str | None:
        """A launch from the last extend's end on reads its window from there."""
        return self._never_at_once(total - max(lease.holds[self.number].first, self.first_page(lease.room_tokens)))

    def extend(self, lease: Lease, needs: dict[int, Any], num_pages: int) -> GroupPages | None:
        need: WindowNeed = needs[self.number]
        if not need.fresh:
            return None
        ids = self.pages.take(need.fresh)
        lease.holds[self.number].page_ids += ids
        return GroupPages(self.number, need.first, pack(ids))

    def shrink(self, lease: Lease, total: int) -> None:
        hold: WindowHold = lease.holds[self.number]
        at = max(total - hold.first, 0)
        self.pages.drop(hold.page_ids[at:], Retention.COLD)
        del hold.page_ids[at:]

    def end(self, lease: Lease) -> int:
        hold: WindowHold = lease.holds[self.number]
        return hold.end

    def merge(self, lease: Lease, node: Node, first: int, end: int, remaps: list[GroupPages]) -> None:
        hold, pages = lease.holds[self.number], self.pages
        for page in range(max(first, hold.first), min(end, hold.end)):
            own = hold.page_ids[page - hold.first]
            standing = node.page_id(self.number, page)
            if not standing:
                pages.publish(own, node, page)
            elif standing != own:
                pages.read((standing,))
                pages.drop((own,), Retention.WARM)
                hold.page_ids[page - hold.first] = standing
                remaps.append(GroupPages(self.number, page, pack([standing])))

    def publish(self, lease: Lease) -> Sequence[Node]:
        """Drops the published pages that no later launch reads."""
        hold: WindowHold = lease.holds[self.number]
        first = min(self.first_page(lease.computed_tokens), hold.end)
        if not lease.bypass:
            first = min(first, lease.published_pages)
        if first > hold.first:
            run = self.reach_pages()
            ends = (*lease.resume_boundaries(self.page_tokens, lease.resumed_pages), *lease.leave_at)
            dropped = hold.page_ids[: first - hold.first]
            warm = [any(end - run <= page < end for end in ends) for page in range(hold.first, first)]
            del hold.page_ids[: len(dropped)]
            hold.first = first
            self.pages.drop([page for page, keep in zip(dropped, warm, strict=True) if not keep], Retention.COLD)
            self.pages.drop([page for page, keep in zip(dropped, warm, strict=True) if keep], Retention.WARM)
        return ()

    def arrive(self, lease: Lease, page_ids: bytes, first: int, end: int) -> Sequence[Node]:
        """Keeps reading each page that arrived, or the one that the tree has in its place."""
        for page, page_id in enumerate(unpack(page_ids), first):
            if page_id and page < end:
                self._fill(lease.node.holder(page), page, page_id)
        return ()

    def held(self, lease: Lease) -> Packed:
        return pack(lease.holds[self.number].page_ids)

    def claim(self, adopt: Adopt, standing: bytes) -> Any:
        """Pages that are in the tree are read; the others must be free."""
        table, first = self._table_of(adopt), self.first_page(adopt.computed_tokens)
        kept = unpack(table.page_ids)[max(first - table.first_page, 0) :]
        if first < table.first_page or not all(kept):
            raise InvalidInput("tables", f"group {self.spec.name} has a hole inside its window")
        pairs = zip(kept, unpack(standing)[first:], strict=False)
        hits = {page_id for page_id, in_tree in pairs if page_id == in_tree}
        return self._taken([page_id for page_id in kept if page_id not in hits]) or (WindowHold(first, kept), hits)

    def adopt(self, lease: Lease, claim: tuple[WindowHold, set[int]]) -> None:
        hold, hits = claim
        self.pages.claim(frozenset(hold.page_ids) - hits)
        self.pages.read(hits)
        lease.holds[self.number] = hold
