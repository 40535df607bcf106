"""What a worker declared about its groups: the rule of each, and their numbers by kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cache_service.core.kinds.full import FullRule
from cache_service.core.kinds.rule import GroupRule, pages_of
from cache_service.core.kinds.state import StateRule
from cache_service.core.kinds.window import WindowRule
from session.words import TOKEN_BYTES, GroupKind, GroupSpec

# Which class says what a kind means.
RULES: dict[GroupKind, type[GroupRule]] = {
    GroupKind.FULL: FullRule,
    GroupKind.WINDOW: WindowRule,
    GroupKind.STATE: StateRule,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """`specs` and `rules` are in the order of the group numbers. The numbers stand by kind, too.

    `sparse` are the groups whose pages may be missing inside a path (`GroupRule.has_holes`).
    """

    specs: tuple[GroupSpec, ...]
    rules: tuple[GroupRule, ...]
    page_tokens: int
    full: tuple[int, ...]
    window: tuple[int, ...]
    state: tuple[int, ...]
    sparse: tuple[int, ...]
    full_mask: int
    page_key_bytes: int  # of a page's token ids, by which nodes are found
    most_pages: int  # of the smallest FULL group; 0 without one

    def pages(self, num_tokens: int) -> int:
        """Returns how many pages hold `num_tokens` tokens."""
        return pages_of(num_tokens, self.page_tokens)


@lru_cache(maxsize=256)
def make_layout(specs: tuple[GroupSpec, ...], page_tokens: int) -> Layout:
    """Workers that declare the same groups share one layout."""

    def of(*kinds: GroupKind) -> tuple[int, ...]:
        return tuple(group for group, spec in enumerate(specs) if spec.kind in kinds)

    rules = tuple(RULES[spec.kind](spec, page_tokens) for spec in specs)
    full = of(GroupKind.FULL)
    return Layout(
        specs=specs,
        rules=rules,
        page_tokens=page_tokens,
        full=full,
        window=of(GroupKind.WINDOW),
        state=of(GroupKind.STATE),
        sparse=tuple(group for group, rule in enumerate(rules) if rule.has_holes),
        full_mask=sum(1 << group for group in full),
        page_key_bytes=page_tokens * TOKEN_BYTES,
        most_pages=min((specs[group].num_pages for group in full), default=0),
    )
