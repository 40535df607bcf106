"""Plan an acquire or an extend: what can be reused, what is needed, whether it fits. Reads only.

A plan asks whether free + evictable - evictable hits covers the need. It names no victim: the commit chooses,
and cannot fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache_service.core.base.page_hash import PromptHashes
from cache_service.core.base.types import FetchPolicy
from cache_service.core.device.device_cache import DeviceCache
from cache_service.core.device.lease_table import Lease
from cache_service.core.device.page_pool import unpack
from cache_service.core.device.radix_node import Node, Root
from cache_service.core.device.radix_tree import Walk
from cache_service.core.kinds.layout import Layout
from cache_service.core.verbs.prefix_match import PrefixMatch, match_prefix
from session.messages import Acquire, Refusal
from session.words import PAGE_ID_BYTES, TOKEN_BYTES, Match, MissReason, RefusalReason


@dataclass(slots=True)
class WindowPlan:
    """Page numbers first .. end - 1: `hits` by page number are read, the others are taken fresh."""

    first: int
    end: int
    hits: dict[int, int]

    @property
    def fresh(self) -> int:
        return self.end - self.first - len(self.hits)


@dataclass(slots=True)
class Plan:
    """Boundaries in pages: the lease pins the path up to `base`, its first launch starts at `boundary` once fetched."""

    found: PrefixMatch
    boundary: int
    base: int
    place: Walk  # where `base` lies
    total: int
    windows: dict[int, WindowPlan]
    snapshots: dict[int, int]  # by STATE group: the slot to restore; 0: to be fetched


def match_of(plan: Plan, layout: Layout) -> Match:
    """What was found, unless a pool could never hold the window before its usable boundary."""
    match = plan.found.match(layout.page_tokens)
    if plan.boundary >= plan.found.usable_pages:
        return match
    limiting = layout.specs[layout.window[0]].name
    return match._replace(usable_tokens=0, limiting_group=limiting, miss_reason=MissReason.WINDOW_GONE)


def plan_acquire(
    cache: DeviceCache, acquire: Acquire, may_fetch: bool, hashes: PromptHashes | None = None
) -> Plan | Refusal:
    """The best way in that fits: with a fetch, without, and from 0 where a pool could never hold the resumed window."""
    layout, tokens = cache.layout, acquire.tokens
    total = -(-len(tokens) // layout.page_key_bytes)
    if total + acquire.reserve_pages > layout.most_pages or layout.window:
        never = never_fits(cache, acquire)
        if never is not None:
            return Refusal(acquire.sequence_id, RefusalReason.NEVER_FITS, never)
    host = cache.host if may_fetch else None
    if acquire.bypass_cache:
        found = _nothing(layout, acquire)
    else:
        found = match_prefix(cache.tree, layout, acquire.namespace, tokens, host, hashes)
    most = cache.config.max_lease_bytes
    if cache.leases.num_bytes + len(tokens) > most and cache.leases:
        return Refusal(acquire.sequence_id, RefusalReason.NO_ROOM, f"live sequences may hold {most} bytes of tokens")
    detail = ""
    plain = found.host_pages == found.usable_pages and not layout.window
    for boundary in (found.usable_pages,) if plain else _boundaries(cache, found):
        base, place = found.matched_pages, found.walk
        if boundary < base:
            base, place = boundary, locate(place, boundary)
        plan = Plan(found, boundary, base, place, total, {}, {})
        if layout.sparse:
            _plan_sparse(plan, layout, acquire)
        lacks = _lacks(cache, plan, acquire.reserve_pages)
        if lacks is None:
            return plan
        detail = lacks
        if boundary <= found.usable_pages and not _can_never_hold(cache, plan):
            break
    return Refusal(acquire.sequence_id, RefusalReason.NO_ROOM, detail)


def _nothing(layout: Layout, acquire: Acquire) -> PrefixMatch:
    """What a request that bypasses the cache finds."""
    walk = Walk(Root(acquire.namespace, len(layout.specs)), None, 0)
    limit = (len(acquire.tokens) - 1) // layout.page_key_bytes
    return PrefixMatch(walk, limit, 0, 0, 0, MissReason.BYPASSED, dict.fromkeys(layout.sparse, b""))


def _boundaries(cache: DeviceCache, found: PrefixMatch) -> Sequence[int]:
    """A fetch that pays, then what is usable, then 0: a pool may never hold the window before a usable boundary."""
    options = [found.host_pages] if found.host_pages > found.usable_pages and fetch_pays(cache, found) else []
    options.append(found.usable_pages)
    if found.usable_pages and cache.layout.window:
        options.append(0)
    return options


def fetch_pays(cache: DeviceCache, found: PrefixMatch) -> bool:
    """By measured rates; granted until they are known."""
    if cache.transfers.num_fetching >= cache.config.max_open_tickets:
        return False
    rates = cache.rates
    if cache.config.fetch is FetchPolicy.ALWAYS or rates.prefill_tokens_per_s <= 0 or rates.fetch_bytes_per_s <= 0:
        return True
    layout = cache.layout
    num_bytes = sum(rule.fetch_bytes(found.matched_pages, found.host_pages) for rule in layout.rules)
    tokens = (found.host_pages - found.usable_pages) * layout.page_tokens
    return num_bytes / rates.fetch_bytes_per_s < tokens / rates.prefill_tokens_per_s


def never_fits(cache: DeviceCache, acquire: Acquire) -> str | None:
    """Returns why the prompt could not run on an empty worker either; None when it could."""
    layout, num_tokens = cache.layout, len(acquire.tokens) // TOKEN_BYTES
    for group in (*layout.full, *layout.sparse):
        never = layout.rules[group].never_fits(num_tokens, acquire.chunk_tokens, acquire.reserve_pages)
        if never is not None:
            return never
    return None


def _plan_sparse(plan: Plan, layout: Layout, acquire: Acquire) -> None:
    """Windows of the first chunk, and the snapshots at the boundary."""
    found, boundary, num_tokens = plan.found, plan.boundary, len(acquire.tokens) // TOKEN_BYTES
    start = boundary * layout.page_tokens
    end = layout.pages(min(num_tokens, start + (acquire.chunk_tokens or num_tokens)))
    for group in layout.window:
        first = layout.rules[group].first_page(start)
        ids = found.sparse_ids[group][first * PAGE_ID_BYTES : boundary * PAGE_ID_BYTES]
        hits = {first + at: page_id for at, page_id in enumerate(unpack(ids)) if page_id}
        plan.windows[group] = WindowPlan(first, end, hits)
    if boundary:
        for group in layout.state:
            at = (boundary - 1) * PAGE_ID_BYTES
            slot = found.sparse_ids[group][at : at + PAGE_ID_BYTES]
            plan.snapshots[group] = int.from_bytes(slot, "little")


def _can_never_hold(cache: DeviceCache, plan: Plan) -> bool:
    return any(w.end - w.first > cache.layout.specs[group].num_pages for group, w in plan.windows.items())


def _lacks(cache: DeviceCache, plan: Plan, reserve: int) -> str | None:
    """Returns which group has too few pages for the plan; None when it fits."""
    need = plan.total - plan.base + reserve - (cache.tree.evictable_pages - evictable_hits(plan.place))
    for group, pool in cache.full_pools:
        if pool.num_free < need:
            return f"group {cache.layout.specs[group].name} lacks pages"
    return _lacks_sparse(cache, plan) if cache.sparse else None


def _lacks_sparse(cache: DeviceCache, plan: Plan) -> str | None:
    layout = cache.layout
    for group, window in plan.windows.items():
        pages = cache.sparse[group]
        hits = sum(map(pages.is_unread, window.hits.values()))
        if pages.num_available - hits < window.fresh:
            return f"group {layout.specs[group].name} lacks pages"
    for group in layout.state:
        pages = cache.sparse[group]
        slot = plan.snapshots.get(group)
        restored = slot is not None and slot != 0 and pages.is_unread(slot)
        if pages.num_available - restored < 1 + (slot == 0):
            return f"group {layout.specs[group].name} lacks slots"
    return None


def locate(walk: Walk, base: int) -> Walk:
    """The part of a walk that ends at page number `base`, before the walk's own end."""
    if base == 0:
        return Walk(walk.node.root, None, 0)
    node = (walk.child if walk.child is not None and walk.pages else walk.node).holder(base - 1)
    if node.end == base:
        return Walk(node, None, 0)
    assert node.parent is not None
    return Walk(node.parent, node, base - node.start)


def evictable_hits(place: Walk) -> int:
    """Pages up to there that nobody pins yet: the commit takes them out of the evictable ones."""
    node, child, pages = place.node, place.child, place.pages
    hits = pages if child is not None and not child.pins else 0
    step: Node | None = node
    while step is not None and not step.pins:
        hits += step.resident
        step = step.parent
    return hits


def lacks_for_extend(cache: DeviceCache, lease: Lease, total: int) -> str | None:
    """Returns which group has too few pages for a length of `total` pages; None when it fits."""
    need = total - lease.full_end - cache.tree.evictable_pages
    for group, pool in cache.full_pools:
        if pool.num_free < need:
            return f"group {cache.layout.specs[group].name} lacks pages"
    for group, hold in lease.windows.items():
        if cache.sparse[group].num_available < total - hold.end:
            return f"group {cache.layout.specs[group].name} lacks pages"
    return None
