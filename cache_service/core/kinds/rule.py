"""What a kind of group means: at which page boundaries a sequence can resume, what that reads, and what never fits.

A new kind is a file in this folder and a line in `RULES` (layout.py). A rule is asked about one group. It reads packed
residency in prompt order, one byte for each page, 0 for a hole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import ClassVar

from session.words import GroupSpec, MissReason


class GroupRule(ABC):
    """One group's rule. Boundaries and pages are page numbers, unless their names say tokens."""

    has_holes: ClassVar[bool]
    """Whether pages may be missing inside a path: they are then evicted one by one, not with their node."""

    miss_reason: ClassVar[MissReason]
    """Why tokens miss where this group alone cannot resume."""

    def __init__(self, spec: GroupSpec, page_tokens: int) -> None:
        self.spec, self.page_tokens = spec, page_tokens

    @abstractmethod
    def resume(self, resident: bytes, limit: int) -> int:
        """Returns the largest boundary, at most `limit`, at which this group alone can resume."""

    @abstractmethod
    def reach_pages(self) -> int:
        """Returns how many whole pages before a boundary, away from the start, resuming there may read."""

    @abstractmethod
    def first_page(self, boundary_tokens: int) -> int:
        """Returns the first page that a launch from `boundary_tokens` on still reads."""

    @abstractmethod
    def fetch_bytes(self, matched: int, boundary: int) -> int:
        """Returns at most how many bytes a fetch brings so that this group can resume at `boundary`."""

    def never_fits(self, num_tokens: int, chunk_tokens: int, reserve_pages: int) -> str | None:
        """Returns why a prompt cannot run on an empty worker either; `chunk_tokens`: those of its first launch."""
        return None


def pages_of(num_tokens: int, page_tokens: int) -> int:
    """Returns how many pages of `page_tokens` tokens hold `num_tokens` tokens."""
    return -(-num_tokens // page_tokens)


def residency(page_ids: bytes | bytearray) -> bytes:
    """Returns one byte for each packed page id: 1 where the page is resident."""
    ids = array("I")
    ids.frombytes(page_ids)
    return bytes(map(bool, ids))


def resume(rules: Sequence[GroupRule], resident: Sequence[bytes], limit: int) -> int:
    """Returns the largest boundary at which every group can resume: sweeps until no group lowers it any more."""
    boundary = limit
    while True:
        before = boundary
        for rule, flags in zip(rules, resident, strict=True):
            boundary = rule.resume(flags, boundary)
        if boundary == before:
            return boundary


def limiting_rule(rules: Sequence[GroupRule], resident: Sequence[bytes], limit: int) -> GroupRule | None:
    """Returns the rule of the first group that cannot resume at `limit` itself."""
    for rule, flags in zip(rules, resident, strict=True):
        if rule.resume(flags, limit) < limit:
            return rule
    return None
