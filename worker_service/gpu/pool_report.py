"""What a worker logs of its pools when it starts: how much they hold, and whether any prompt can reuse a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from session.words import GroupKind, GroupSpec


class GroupCapacity(NamedTuple):
    name: str
    num_pages: int
    capacity_tokens: int
    size_mb: int


class PoolReport(NamedTuple):
    """`least_hit_tokens` is the shortest prompt that can reuse a prefix; `warning` is None where some can."""

    groups: tuple[GroupCapacity, ...]
    least_hit_tokens: int
    warning: str | None


def pool_report(specs: Sequence[GroupSpec], page_tokens: int, max_model_len: int) -> PoolReport:
    """A prompt hits by whole pages, must compute one token, and must leave room for one generated token."""
    groups = tuple(
        GroupCapacity(spec.name, spec.num_pages, spec.num_pages * page_tokens, spec.num_pages * spec.page_bytes >> 20)
        for spec in specs
    )
    least_hit_tokens = page_tokens + 1
    return PoolReport(groups, least_hit_tokens, _obstacle(specs, least_hit_tokens, max_model_len))


def _obstacle(specs: Sequence[GroupSpec], least_hit_tokens: int, max_model_len: int) -> str | None:
    """Returns why no prompt can ever reuse a prefix, and what to set; None where one can."""
    if least_hit_tokens >= max_model_len:
        return (
            f"no prompt can reuse a prefix: that takes {least_hit_tokens} tokens (page_tokens + 1), and prompts have "
            f"at most {max_model_len - 1} (max_model_len - 1); set page_tokens lower or max_model_len higher"
        )
    for spec in specs:
        if spec.kind is GroupKind.STATE and spec.num_pages < 2:
            return (
                f"no prompt can reuse a prefix: group {spec.name} has {spec.num_pages} pages, and a running sequence "
                "takes one beside the snapshot that it resumes from; set pool_pages or pool_mb higher"
            )
    return None
