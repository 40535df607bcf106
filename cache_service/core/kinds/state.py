"""STATE: snapshots at page boundaries. A sequence resumes at b when there is one at b; it is page number b - 1."""

from __future__ import annotations

from typing import ClassVar

from cache_service.core.kinds.rule import GroupRule
from session.words import MissReason


class StateRule(GroupRule):
    has_holes: ClassVar[bool] = True
    miss_reason: ClassVar[MissReason] = MissReason.NO_SNAPSHOT

    def resume(self, resident: bytes, limit: int) -> int:
        return resident.rfind(b"\1", 0, limit) + 1

    def reach_pages(self) -> int:
        return 1

    def first_page(self, boundary_tokens: int) -> int:
        return max(boundary_tokens // self.page_tokens - 1, 0)

    def fetch_bytes(self, matched: int, boundary: int) -> int:
        return self.spec.page_bytes
