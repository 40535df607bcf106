"""What groups whose pages may be missing inside a path have in common: those of WINDOW and of STATE."""

from __future__ import annotations

from cache_service.core.base.stats import GroupStats
from cache_service.core.device.page_pool import unpack
from cache_service.core.device.radix_node import Node, Packed
from cache_service.core.device.sparse_pages import Retention, SparsePages
from cache_service.core.kinds.group import Group, present
from session.words import GroupSpec, Transfer


class SparseGroup(Group):
    """A group with holes: pages may be missing inside a path, and are read, published and evicted one by one."""

    def __init__(self, number: int, spec: GroupSpec, page_tokens: int, pages: SparsePages) -> None:
        self.pages = pages
        super().__init__(number, spec, page_tokens, pages.pool)

    def _fill(self, node: Node, page: int, page_id: int) -> bool:
        is_hole = not node.page_id(self.number, page)
        if is_hole:
            self.pages.publish(page_id, node, page)
        return is_hole

    def fill(self, node: Node, first: int, page_ids: bytes) -> None:
        for page, page_id in enumerate(unpack(page_ids), first):
            if page_id and self.pool.is_free(page_id) and not node.holder(page).page_id(self.number, page):
                self.pages.claim(frozenset((page_id,)))
                self.pages.publish(page_id, node.holder(page), page)
                self.pages.drop((page_id,), Retention.WARM)

    def drop(self, page_ids: Packed) -> None:
        self.pages.drop(unpack(page_ids), Retention.WARM)

    def begin_copy(self, page_ids: bytes) -> None:
        self.pages.read(present(page_ids))

    def end_copy(self, page_ids: bytes) -> None:
        for page_id in present(page_ids):
            self.pages.drop_unused(page_id)

    def num_copied(self, transfer: Transfer) -> int:
        return sum(len(present(row.page_ids)) for row in transfer.groups if row.group == self.number)

    def stats(self, evictable: int, evicted: int) -> GroupStats:
        counted = super().stats(self.pages.num_evictable, self.pages.num_evicted)
        return counted._replace(limited_tokens=self.limited_tokens)
