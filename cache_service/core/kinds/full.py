"""FULL: one page for each page of tokens. A sequence resumes at b when every page of [0, b) is resident."""

from __future__ import annotations

from typing import ClassVar

from cache_service.core.kinds.rule import GroupRule, pages_of
from session.words import MissReason


def leading(resident: bytes, limit: int) -> int:
    """Returns how many pages are resident before the first hole, at most `limit`."""
    hole = resident.find(b"\0", 0, limit)
    return min(limit, len(resident)) if hole < 0 else hole


class FullRule(GroupRule):
    has_holes: ClassVar[bool] = False
    miss_reason: ClassVar[MissReason] = MissReason.NEVER_SEEN

    def resume(self, resident: bytes, limit: int) -> int:
        return leading(resident, limit)

    def reach_pages(self) -> int:
        return 0

    def first_page(self, boundary_tokens: int) -> int:
        return 0

    def fetch_bytes(self, matched: int, boundary: int) -> int:
        return max(boundary - matched, 0) * self.spec.page_bytes

    def never_fits(self, num_tokens: int, chunk_tokens: int, reserve_pages: int) -> str | None:
        """The whole prompt and the reserve are held at once."""
        pages, spec = pages_of(num_tokens, self.page_tokens), self.spec
        if pages + reserve_pages <= spec.num_pages:
            return None
        wanted = f"{pages} pages" + (f" and a reserve of {reserve_pages}" if reserve_pages else "")
        return f"{num_tokens} tokens take {wanted}; group {spec.name} has {spec.num_pages}"
