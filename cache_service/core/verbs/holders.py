"""Who holds the cached pages of a prompt on one worker, so that they cannot be evicted. Reads only."""

from __future__ import annotations

from typing import NamedTuple

from cache_service.core.base.types import Holder
from cache_service.core.device.radix_node import Node
from cache_service.core.device_cache import DeviceCache
from cache_service.core.verbs.prefix_match import PrefixMatch

# Sequences that Explain names for each worker.
MAX_HOLDERS = 16


class Holders(NamedTuple):
    """`sequences` are those that hold most, `num_sequences` counts all; a spill holds what it copies until its ack."""

    sequences: tuple[Holder, ...] = ()
    num_sequences: int = 0
    spilling_tokens: int = 0


def find_holders(cache: DeviceCache, found: PrefixMatch) -> Holders:
    """Returns which sequences and how many pages of open spills hold leading pages of the prompt."""
    if not found.matched_pages:
        return Holders()
    page_tokens, held = cache.layout.page_tokens, _HeldPages(cache, found)
    holders = [Holder(lease.sequence_id, held.up_to(lease.node) * page_tokens) for lease in cache.leases.all()]
    holders = sorted((one for one in holders if one.num_tokens), key=lambda one: (-one.num_tokens, one.sequence_id))
    spilling = 0
    for spill in cache.transfers.spills.values():
        first, end = spill.transfer.first_page, held.up_to(spill.node)
        spilling += max(min(first + spill.transfer.num_pages, end) - first, 0)
    return Holders(tuple(holders[:MAX_HOLDERS]), len(holders), spilling * page_tokens)


class _HeldPages:
    """Counts the leading pages of a prompt that the holder of a node holds: those of the path down to that node."""

    def __init__(self, cache: DeviceCache, found: PrefixMatch) -> None:
        walk = found.walk
        self._ends: dict[Node, int] = {walk.node.root: 0}
        for node in cache.tree.path(walk.node):
            self._ends[node] = node.end
        if walk.child is not None:
            self._ends[walk.child] = walk.end

    def up_to(self, node: Node) -> int:
        """Returns the count for a node, found by a walk up to the prompt's path."""
        passed: list[Node] = []
        step: Node | None = node
        while step is not None and step not in self._ends:
            passed.append(step)
            step = step.parent
        end = self._ends[step] if step is not None else 0
        for one in passed:
            self._ends[one] = end
        return end
