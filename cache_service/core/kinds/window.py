"""WINDOW(w): pages behind the window may go. A sequence resumes at b when the w - 1 tokens before b are resident."""

from __future__ import annotations

from typing import ClassVar

from cache_service.core.kinds.full import leading
from cache_service.core.kinds.rule import GroupRule, pages_of
from session.words import MissReason


class WindowRule(GroupRule):
    has_holes: ClassVar[bool] = True
    miss_reason: ClassVar[MissReason] = MissReason.WINDOW_GONE

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
        return max(0, boundary_tokens - (self.spec.window_tokens - 1)) // self.page_tokens

    def fetch_bytes(self, matched: int, boundary: int) -> int:
        return (boundary - self.first_page(boundary * self.page_tokens)) * self.spec.page_bytes

    def never_fits(self, num_tokens: int, chunk_tokens: int, reserve_pages: int) -> str | None:
        """The first chunk is held at once; pages behind the window go before the next one."""
        pages, spec = pages_of(min(num_tokens, chunk_tokens or num_tokens), self.page_tokens), self.spec
        if pages <= spec.num_pages:
            return None
        return f"the first chunk takes {pages} pages; group {spec.name} has {spec.num_pages}"
