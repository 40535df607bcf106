"""Plan an acquire or an extend: what can be reused, what is needed, whether it fits. Reads only.

A plan asks whether free + evictable - evictable hits covers the need. It names no victim: the commit chooses,
and cannot fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cache_service.core.base.page_hash import PromptHashes
from cache_service.core.device.radix_node import Node, Root
from cache_service.core.device.radix_tree import Walk
from cache_service.core.device_cache import DeviceCache
from cache_service.core.kinds.group import Group
from cache_service.core.verbs.fetch_policy import why_not_fetched
from cache_service.core.verbs.prefix_match import PrefixMatch, match_prefix
from session.messages import Acquire, Refusal
from session.words import TOKEN_BYTES, Match, MissReason, RefusalReason


@dataclass(slots=True)
class Plan:
    """Boundaries in pages: the lease pins the path up to `base`, its first launch starts at `boundary` once fetched."""

    found: PrefixMatch
    boundary: int
    base: int
    place: Walk  # where `base` lies
    total: int
    needs: dict[int, Any]  # by the numbers of groups with holes
    limiting: Group | None = None  # which can never hold what the usable boundary needs, so that this one is 0


def match_of(plan: Plan, page_tokens: int) -> Match:
    match, limiting = plan.found.match(page_tokens), plan.limiting
    if limiting is None:
        return match
    return match._replace(usable_tokens=0, limiting_group=limiting.spec.name, miss_reason=limiting.miss_reason)


def plan_acquire(
    cache: DeviceCache, acquire: Acquire, may_fetch: bool, hashes: PromptHashes | None = None
) -> Plan | Refusal:
    """Returns the first plan that fits: with a fetch, without one, or from 0 where no pool could hold what is
    resumed."""
    layout, tokens = cache.layout, acquire.tokens
    total = -(-len(tokens) // layout.page_key_bytes)
    if total + acquire.reserve_pages > layout.most_pages:
        never = never_fits(cache, acquire)
        if never is not None:
            return Refusal(acquire.sequence_id, RefusalReason.NEVER_FITS, never)
    host = cache.host if may_fetch else None
    if acquire.bypass_cache:
        found = _nothing(cache, acquire)
    else:
        found = match_prefix(cache, acquire.namespace, tokens, host, hashes)
    lacks_bytes = lacks_lease_bytes(cache, len(tokens))
    if lacks_bytes is not None:
        return Refusal(acquire.sequence_id, RefusalReason.NO_ROOM, lacks_bytes)
    detail, limiting = "", None
    is_plain = found.host_pages == found.usable_pages
    for boundary in (found.usable_pages, 0) if is_plain else _boundaries(cache, found):
        base, place = found.matched_pages, found.walk
        if boundary < base:
            base, place = boundary, locate(place, boundary)
        needs: dict[int, Any] = {}
        for group in cache.sparse:
            needs[group.number] = group.need(found.sparse_ids[group.number], boundary, acquire)
        evictable = cache.tree.evictable_pages - evictable_hits(place)
        lacks = lacks_pages(cache, needs, total - base + acquire.reserve_pages - evictable)
        if lacks is None:
            return Plan(found, boundary, base, place, total, needs, limiting)
        detail = lacks
        if boundary <= found.usable_pages:
            limiting = next((group for group in cache.sparse if group.never_holds(needs[group.number])), None)
            if limiting is None:
                break
    return Refusal(acquire.sequence_id, RefusalReason.NO_ROOM, detail)


def _nothing(cache: DeviceCache, acquire: Acquire) -> PrefixMatch:
    """Returns the match of a request that bypasses the cache: nothing."""
    walk = Walk(Root(acquire.namespace, len(cache.groups)), None, 0)
    limit = (len(acquire.tokens) - 1) // cache.layout.page_key_bytes
    return PrefixMatch(walk, limit, 0, 0, 0, MissReason.BYPASSED, {group.number: b"" for group in cache.sparse})


def _boundaries(cache: DeviceCache, found: PrefixMatch) -> Sequence[int]:
    """Returns the boundaries to try: that of a fetch that pays, the usable one, and 0, if no pool has room for it.

    Where the host tier has more and is not asked for it, that is why no more is reused.
    """
    usable, host = found.usable_pages, found.host_pages
    declined = why_not_fetched(cache, found)
    if declined is None:
        return (host, usable, 0)
    found.reason = declined
    return (usable, 0)


def never_fits(cache: DeviceCache, acquire: Acquire) -> str | None:
    """Returns why the prompt could not run on an empty worker either; None when it could."""
    num_tokens = len(acquire.tokens) // TOKEN_BYTES
    for group in cache.groups:
        never = group.never_fits(num_tokens, acquire.chunk_tokens, acquire.reserve_pages)
        if never is not None:
            return never
    return None


def lacks_lease_bytes(cache: DeviceCache, num_bytes: int, factor: int = 1) -> str | None:
    """Returns which limit of bytes of tokens is exceeded with `num_bytes` more; None when they fit.

    `factor` multiplies the limits. The longest prompt is admitted where no lease holds any.
    """
    leases, config = cache.leases, cache.config
    most, most_of_all = factor * config.max_lease_bytes, factor * config.max_total_lease_bytes
    total = leases.total.num_bytes
    if leases.num_bytes and leases.num_bytes + num_bytes > most:
        return f"live sequences may hold {most} bytes of tokens"
    if total and total + num_bytes > most_of_all:
        return f"live sequences of all workers together may hold {most_of_all} bytes of tokens"
    return None


def lacks_pages(cache: DeviceCache, needs: dict[int, Any], num_pages: int) -> str | None:
    """Returns which group has too few pages for the needs; None when they fit."""
    for group in cache.groups:
        if group.lacks(needs, num_pages):
            return f"group {group.spec.name} lacks {group.unit}"
    return None


def locate(walk: Walk, base: int) -> Walk:
    """Returns the part of a walk up to page number `base`."""
    if base == 0:
        return Walk(walk.node.root, None, 0)
    node = (walk.child if walk.child is not None and walk.pages else walk.node).holder(base - 1)
    if node.end == base:
        return Walk(node, None, 0)
    assert node.parent is not None
    return Walk(node.parent, node, base - node.start)


def evictable_hits(place: Walk) -> int:
    """Returns how many pages of the path are unpinned: the commit pins them, so they cannot be evicted for it."""
    node, child, pages = place.node, place.child, place.pages
    hits = pages if child is not None and not child.pins else 0
    step: Node | None = node
    while step is not None and not step.pins:
        hits += step.resident
        step = step.parent
    return hits
