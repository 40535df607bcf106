"""FULL: one page for each page of tokens. A sequence resumes at b when every page of [0, b) is resident.

Nodes hold the pages, each one of every path, and are evicted with them. FULL groups go in step: a lease's hold is its
own pages as a bytearray of packed ids, from `lease.published_pages` to `lease.full_end`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from cache_service.core.device.eviction_order import EvictionPolicy
from cache_service.core.device.lease_table import Lease
from cache_service.core.device.page_pool import PagePool, unpack
from cache_service.core.device.radix_node import Node, Packed
from cache_service.core.kinds.group import Group, pages_of
from session.errors import InvalidInput
from session.messages import Adopt
from session.words import PAGE_ID_BYTES, GroupPages, GroupSpec, MissReason


def leading(resident: bytes, limit: int) -> int:
    """Returns how many pages are resident before the first hole, at most `limit`."""
    hole = resident.find(b"\0", 0, limit)
    return min(limit, len(resident)) if hole < 0 else hole


class FullGroup(Group):
    miss_reason: ClassVar[MissReason] = MissReason.NEVER_SEEN

    def __init__(self, number: int, spec: GroupSpec, page_tokens: int, policy: EvictionPolicy) -> None:
        super().__init__(number, spec, page_tokens, PagePool(spec.num_pages))

    def resume(self, resident: bytes, limit: int) -> int:
        return leading(resident, limit)

    def reach_pages(self) -> int:
        return self.spec.num_pages

    def fetch_bytes(self, matched: int, boundary: int) -> int:
        return max(boundary - matched, 0) * self.spec.page_bytes

    def never_fits(self, num_tokens: int, chunk_tokens: int, reserve_pages: int) -> str | None:
        """The whole prompt and the reserve are held at once."""
        pages, spec = pages_of(num_tokens, self.page_tokens), self.spec
        if pages + reserve_pages <= spec.num_pages:
            return None
        wanted = f"{pages} pages" + (f" and a reserve of {reserve_pages}" if reserve_pages else "")
        return f"{num_tokens} tokens take {wanted}; group {spec.name} has {spec.num_pages}"

    def lacks(self, needs: dict[int, Any], num_pages: int) -> bool:
        return self.pool.num_free < num_pages

    def take(self, lease: Lease, needs: dict[int, Any], num_pages: int) -> None:
        lease.holds[self.number] = bytearray(self.pool.take(num_pages))

    def targets(self, lease: Lease, needs: dict[int, Any], boundary: int) -> GroupPages:
        first = lease.published_pages
        own = lease.holds[self.number][: (boundary - first) * PAGE_ID_BYTES]
        return GroupPages(self.number, first, bytes(own))

    def table(self, lease: Lease) -> GroupPages:
        """Returns the shared pages of the path, then the lease's own."""
        number = self.number
        parts: list[bytes | bytearray] = [lease.holds[number]]
        node: Node | None = lease.node
        while node is not None:
            parts.append(node.pages[number])
            node = node.parent
        parts.reverse()
        return GroupPages(number, 0, b"".join(parts))

    def never_extends(self, lease: Lease, total: int) -> str | None:
        return self._never_at_once(total)

    def extend(self, lease: Lease, needs: dict[int, Any], num_pages: int) -> GroupPages | None:
        if num_pages <= 0:
            return None
        taken = self.pool.take(num_pages)
        lease.holds[self.number] += taken
        return GroupPages(self.number, lease.full_end, taken)

    def shrink(self, lease: Lease, total: int) -> None:
        hold: bytearray = lease.holds[self.number]
        at = (total - lease.published_pages) * PAGE_ID_BYTES
        self.pool.give(hold[at:])
        del hold[at:]

    def end(self, lease: Lease) -> int:
        return lease.full_end

    def give_to_node(self, lease: Lease, count: int) -> bytearray:
        hold: bytearray = lease.holds[self.number]
        num_bytes = count * PAGE_ID_BYTES
        given = hold[:num_bytes]
        del hold[:num_bytes]
        return given

    def merge(self, lease: Lease, node: Node, first: int, end: int, remaps: list[GroupPages]) -> None:
        """Replaces the lease's next pages by the node's; its own are freed."""
        canonical, own = bytes(node.pages[self.number]), self.give_to_node(lease, end - first)
        if own != canonical:
            self.pool.give(own)
            remaps.append(GroupPages(self.number, first, canonical))

    def held(self, lease: Lease) -> Packed:
        hold: bytearray = lease.holds[self.number]
        return hold

    def claim(self, adopt: Adopt, standing: bytes) -> Any:
        """The pages beyond those that stand. Duplicates of these are left free: the grant shows the others."""
        table = self._table_of(adopt)
        if table.first_page or 0 in unpack(table.page_ids):
            where = f"tables[{adopt.tables.index(table)}].page_ids"
            raise InvalidInput(where, f"a {self.spec.kind.name} group has no holes")
        shared, own = table.page_ids[: len(standing)], table.page_ids[len(standing) :]
        pairs = zip(unpack(shared), unpack(standing), strict=True) if shared != standing else ()
        return self._taken([page_id for page_id, in_tree in pairs if page_id != in_tree]) or (
            self._taken(unpack(own)) or own
        )

    def cannot_restore(self, page_ids: bytes, num_standing: int) -> str | None:
        ids = unpack(page_ids)
        if 0 in ids:
            raise InvalidInput(f"page_ids[{self.number}]", f"a {self.spec.kind.name} group has no holes")
        return self._taken(ids[num_standing:])

    def restored(self, page_ids: bytes) -> bytearray:
        self.pool.claim(unpack(page_ids))
        return bytearray(page_ids)

    def adopt(self, lease: Lease, claim: bytes) -> None:
        self.pool.claim(unpack(claim))
        lease.holds[self.number] = bytearray(claim)
        lease.full_end = lease.published_pages + len(claim) // PAGE_ID_BYTES
