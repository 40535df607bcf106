"""How many pages each group gets: one budget for all, and what a longest prompt and the running sequences need.

The leading group is the one that keeps most of each sequence: full attention where there is some, else the longest
window. A window group needs pages for what runs, and beside these a share of the leading group's pages, for windows
that a later prompt goes on from:

    pages of a window group = min(n, running + share x n)        n: pages of the leading group

A group of states needs a slot for each running sequence, and beside these slots for snapshots, in a share of the
leading group's memory, MIN_SNAPSHOTS at least unless the share is 0:

    slots of a state group = max_num_seqs + min(n, max(MIN_SNAPSHOTS, share x n x page's bytes / snapshot's bytes))

With equal counts, which the share 1 gives, most of a window group's pages would never be used: behind a window they
are free again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from session.limits import MIN_STATE_SLOTS
from session.words import GroupKind
from worker_service.core.errors import PoolError
from worker_service.gpu.group_layout import GroupLayout

MIB = 1 << 20
# One for each of a few prompts: large snapshots would otherwise leave a small pool of pages that nothing can resume in.
MIN_SNAPSHOTS = 8


class PoolDemand(NamedTuple):
    """What the pools must hold.

    max_model_len      tokens of a longest prompt
    max_chunk_tokens   the most tokens of one launch
    max_num_seqs       sequences that run at a time
    window_share       of the leading group's pages: see the module
    state_share        of the leading group's bytes: see the module
    """

    page_tokens: int
    max_model_len: int
    max_chunk_tokens: int
    max_num_seqs: int
    window_share: float
    state_share: float


def plan_pages(layouts: Sequence[GroupLayout], budget_bytes: int, demand: PoolDemand) -> tuple[int, ...]:
    """Returns usable pages per group within the budget. Raises PoolError if one longest prompt does not fit."""
    _check_states(layouts, budget_bytes, demand)
    most = budget_bytes // leading(layouts).page_bytes
    # The largest n whose pools fit: their size never falls with n.
    low, high = 0, most
    while low < high:
        n = (low + high + 1) // 2
        low, high = (n, high) if pool_bytes(layouts, counts_for(layouts, n, demand)) <= budget_bytes else (low, n - 1)
    counts = counts_for(layouts, low, demand)
    try:
        check_pool(layouts, counts, demand)
    except PoolError as error:
        sizes = ", ".join(f"{layout.name} {layout.page_bytes}" for layout in layouts)
        raise PoolError(f"{error}; the budget is {budget_bytes} bytes, a page takes: {sizes}") from error
    return counts


def _check_states(layouts: Sequence[GroupLayout], budget_bytes: int, demand: PoolDemand) -> None:
    """Raises PoolError where the states of running sequences and the least snapshots take the whole budget."""
    slot_bytes = sum(layout.page_bytes for layout in layouts if layout.kind is GroupKind.STATE)
    num_snapshots = MIN_SNAPSHOTS if demand.state_share else 0
    needed = (demand.max_num_seqs + num_snapshots + 1) * slot_bytes
    if needed >= budget_bytes and any(layout.kind is not GroupKind.STATE for layout in layouts):
        raise PoolError(
            f"max_num_seqs: the states of {demand.max_num_seqs} running sequences and {num_snapshots} snapshots, of "
            f"{slot_bytes / MIB:.1f} MiB each, take {needed / MIB:.0f} MiB, and the pools have "
            f"{budget_bytes / MIB:.0f}; set it lower, or the pools' memory (pool_mb, memory_fraction) higher"
        )


def leading(layouts: Sequence[GroupLayout]) -> GroupLayout:
    return max(layouts, key=lambda layout: math.inf if layout.kind is GroupKind.FULL else layout.window_tokens)


def counts_for(layouts: Sequence[GroupLayout], n: int, demand: PoolDemand) -> tuple[int, ...]:
    """Returns each group's pages when the leading one has n."""
    first = leading(layouts)
    slots = demand.max_num_seqs + num_snapshots(layouts, n, demand)
    return tuple(
        n if layout is first else slots if layout.kind is GroupKind.STATE else _window_pages(layout, n, demand)
        for layout in layouts
    )


def num_snapshots(layouts: Sequence[GroupLayout], n: int, demand: PoolDemand) -> int:
    """Returns how many snapshots are kept when the leading group has n pages; each has a slot in every state group.
    More than one at the end of each page is never used."""
    snapshot_bytes = sum(layout.page_bytes for layout in layouts if layout.kind is GroupKind.STATE)
    if not snapshot_bytes or not demand.state_share:
        return 0
    share_bytes = n * leading(layouts).page_bytes * demand.state_share
    return min(n, max(MIN_SNAPSHOTS, int(share_bytes / snapshot_bytes)))


def _window_pages(layout: GroupLayout, n: int, demand: PoolDemand) -> int:
    if layout.kind is not GroupKind.WINDOW:
        return n
    return min(n, running_pages(layout, demand) + math.ceil(n * demand.window_share))


def running_pages(layout: GroupLayout, demand: PoolDemand) -> int:
    """Returns pages of a window group for everything that runs: each sequence its window and two cut pages, and what
    three launches write, one that runs, one that is queued, and one whose pages are asked for."""
    window = math.ceil(layout.window_tokens / demand.page_tokens) + 2
    return demand.max_num_seqs * window + 3 * math.ceil(demand.max_chunk_tokens / demand.page_tokens)


def pool_bytes(layouts: Sequence[GroupLayout], counts: Sequence[int]) -> int:
    """Returns the bytes of the pools, with the reserved page of each."""
    return sum(layout.page_bytes * (count + 1) for layout, count in zip(layouts, counts, strict=True))


def check_pool(layouts: Sequence[GroupLayout], num_pages: Sequence[int], demand: PoolDemand) -> None:
    """Raises PoolError for pools in which one longest prompt does not fit, or too few states for what runs."""
    for layout, count in zip(layouts, num_pages, strict=True):
        if layout.kind is GroupKind.STATE and count < demand.max_num_seqs:
            raise PoolError(
                f"max_num_seqs: {demand.max_num_seqs} sequences need a slot of group {layout.name} each, whose pool "
                f"has {count}"
            )
        if layout.kind is GroupKind.STATE and count < MIN_STATE_SLOTS:
            raise PoolError(
                f"state_share: group {layout.name} has {count} slot, and needs {MIN_STATE_SLOTS}: one for a running "
                "sequence and one for the snapshot that it resumes from; set it or the pools' memory higher"
            )
        needed = longest_prompt_pages(layout, demand)
        if count < needed:
            raise PoolError(
                f"max_model_len: a prompt of {demand.max_model_len} tokens needs {needed} pages of group "
                f"{layout.name}, whose pool has {count}"
            )


def check_interval(layouts: Sequence[GroupLayout], interval_tokens: int, page_tokens: int) -> int:
    """Returns how far apart prompts leave snapshots; 0 for a model without states. Raises PoolError where that is no
    boundary of pages."""
    if all(layout.kind is not GroupKind.STATE for layout in layouts):
        return 0
    if interval_tokens % page_tokens:
        raise PoolError(f"state_interval_tokens: {interval_tokens} is no multiple of page_tokens = {page_tokens}")
    return interval_tokens


def longest_prompt_pages(layout: GroupLayout, demand: PoolDemand) -> int:
    """Returns pages of one longest prompt.

    Behind a window they are evictable: it needs the window, two chunks, two edges. Of a state group it needs a slot.
    """
    if layout.kind is GroupKind.STATE:
        return 1
    whole = math.ceil(demand.max_model_len / demand.page_tokens)
    if layout.kind is not GroupKind.WINDOW:
        return whole
    return min(whole, math.ceil((layout.window_tokens + 2 * demand.max_chunk_tokens) / demand.page_tokens) + 2)


def pool_budget(device: torch.device, memory_fraction: float, cpu_bytes: int) -> int:
    """Returns bytes for pages after the weights are loaded: a share of a CUDA device's free memory, or `cpu_bytes`."""
    if device.type != "cuda":
        return cpu_bytes
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes * memory_fraction)
