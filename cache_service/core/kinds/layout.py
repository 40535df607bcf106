"""What a worker declared about its groups: their numbers, which kinds they are of, and their pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cache_service.core.device.eviction_order import EvictionPolicy
from cache_service.core.kinds.group import Group, pages_of
from cache_service.core.kinds.registry import KINDS
from cache_service.core.kinds.sparse_group import SparseGroup
from session.words import TOKEN_BYTES, GroupSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """`specs` are in the order of the group numbers."""

    specs: tuple[GroupSpec, ...]
    page_tokens: int
    page_key_bytes: int  # of a page's token ids, by which nodes are found
    full_mask: int  # of the groups without holes, whose pages are those of each path
    resumes_anywhere: bool  # at each boundary of a path: there is no other group
    most_pages: int  # of the smallest group: the longest prompt that fits an empty worker

    def pages(self, num_tokens: int) -> int:
        """Returns how many pages hold `num_tokens` tokens."""
        return pages_of(num_tokens, self.page_tokens)


@lru_cache(maxsize=256)
def make_layout(specs: tuple[GroupSpec, ...], page_tokens: int) -> Layout:
    """Workers that declare the same groups share one layout."""
    full_mask = sum(1 << number for number, spec in enumerate(specs) if not issubclass(KINDS[spec.kind], SparseGroup))
    return Layout(
        specs=specs,
        page_tokens=page_tokens,
        page_key_bytes=page_tokens * TOKEN_BYTES,
        full_mask=full_mask,
        resumes_anywhere=full_mask + 1 == 1 << len(specs),
        most_pages=min(spec.num_pages for spec in specs),
    )


def make_groups(layout: Layout, policy: EvictionPolicy) -> tuple[Group, ...]:
    """`policy` orders the nodes in which pages stand."""
    return tuple(KINDS[spec.kind](number, spec, layout.page_tokens, policy) for number, spec in enumerate(layout.specs))
