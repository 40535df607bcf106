"""What a worker declared about its groups, sorted by kind once. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from session.words import TOKEN_BYTES, GroupKind, GroupSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """Group numbers by kind; `sparse` are those whose pages may be missing inside a path."""

    specs: tuple[GroupSpec, ...]
    page_tokens: int
    full: tuple[int, ...]
    window: tuple[int, ...]
    state: tuple[int, ...]
    sparse: tuple[int, ...]
    full_mask: int
    page_bytes: int
    most_pages: int  # of the smallest FULL group; 0 without one

    def pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_tokens)


@lru_cache(maxsize=256)
def make_layout(specs: tuple[GroupSpec, ...], page_tokens: int) -> Layout:
    """Workers that declare the same groups share one layout."""

    def of(*kinds: GroupKind) -> tuple[int, ...]:
        return tuple(group for group, spec in enumerate(specs) if spec.kind in kinds)

    full = of(GroupKind.FULL)
    return Layout(
        specs=specs,
        page_tokens=page_tokens,
        full=full,
        window=of(GroupKind.WINDOW),
        state=of(GroupKind.STATE),
        sparse=of(GroupKind.WINDOW, GroupKind.STATE),
        full_mask=sum(1 << group for group in full),
        page_bytes=page_tokens * TOKEN_BYTES,
        most_pages=min((specs[group].num_pages for group in full), default=0),
    )
