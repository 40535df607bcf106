"""What a worker logs of its pools when it starts: how much they hold, and whether any prompt can reuse a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from session.words import GroupKind, GroupSpec


class GroupCapacity(NamedTuple):
    """`capacity_tokens` is 0 for a group of states: its pages are slots of `page_mb` each, of which `num_snapshots` are
    those that max_num_seqs running sequences leave."""

    name: str
    num_pages: int
    capacity_tokens: int
    size_mb: int
    page_mb: float
    num_snapshots: int = 0


class PoolReport(NamedTuple):
    """`least_hit_tokens` is the shortest prompt that can reuse a prefix; `warning` is None where some can."""

    groups: tuple[GroupCapacity, ...]
    least_hit_tokens: int
    warning: str | None


def pool_report(specs: Sequence[GroupSpec], page_tokens: int, max_model_len: int, max_num_seqs: int) -> PoolReport:
    """Returns the report. A prompt hits by whole pages, computes one token at least, and leaves room for a generated
    one."""
    groups = tuple(_capacity(spec, page_tokens, max_num_seqs) for spec in specs)
    least_hit_tokens = page_tokens + 1
    return PoolReport(groups, least_hit_tokens, _obstacle(specs, least_hit_tokens, max_model_len, max_num_seqs))


def _capacity(spec: GroupSpec, page_tokens: int, max_num_seqs: int) -> GroupCapacity:
    size_mb, page_mb = spec.num_pages * spec.page_bytes >> 20, round(spec.page_bytes / (1 << 20), 3)
    if spec.kind is GroupKind.STATE:
        return GroupCapacity(spec.name, spec.num_pages, 0, size_mb, page_mb, max(spec.num_pages - max_num_seqs, 0))
    return GroupCapacity(spec.name, spec.num_pages, spec.num_pages * page_tokens, size_mb, page_mb)


def _obstacle(specs: Sequence[GroupSpec], least_hit_tokens: int, max_model_len: int, max_num_seqs: int) -> str | None:
    """Returns why no prompt can reuse a prefix, ever or under load, and what to set; None where one can."""
    if least_hit_tokens >= max_model_len:
        return (
            f"no prompt can reuse a prefix: that takes {least_hit_tokens} tokens (page_tokens + 1), and prompts have "
            f"at most {max_model_len - 1} (max_model_len - 1); set page_tokens lower or max_model_len higher"
        )
    for spec in specs:
        if spec.kind is GroupKind.STATE and spec.num_pages <= max_num_seqs:
            return (
                f"no prompt can reuse a prefix while {max_num_seqs} sequences run: group {spec.name} has "
                f"{spec.num_pages} slots, one for each of them (max_num_seqs) and none for a snapshot; set state_share "
                "or the pools' memory (pool_mb, pool_pages, memory_fraction) higher, or max_num_seqs lower"
            )
    return None
