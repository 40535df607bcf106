"""Gives a sequence its pages and takes them back: acquire, extend, release, and the new plan after a fetch.

A commit pins the hits, then evicts, then takes; it cannot fail.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cache_service.core.base.types import SpillPolicy
from cache_service.core.device.lease_table import Lease
from cache_service.core.device.page_pool import pack, unpack
from cache_service.core.device.radix_node import Node
from cache_service.core.device_cache import DeviceCache
from cache_service.core.verbs import fetching, publishing, renewal
from cache_service.core.verbs.admission import Plan, lacks_pages, match_of, plan_acquire
from session.messages import Acquire, Extend, ExtendGrant, Grant, Refusal
from session.words import TOKEN_BYTES, GroupPages, MissReason, RefusalReason, ReleaseReason, StateSlot, Transfer

# Acquire.


def acquire(cache: DeviceCache, item: Acquire) -> Grant | Refusal:
    plan = plan_acquire(cache, item, may_fetch=True)
    if isinstance(plan, Refusal):
        cache.counters.refusals += 1
        return plan
    return commit(cache, plan, item, None)


def commit(cache: DeviceCache, plan: Plan, acquire: Acquire, earlier: Lease | None) -> Grant:
    """Commits the plan; `earlier` is the lease that waited for a fetch, if this is a new plan after its ack."""
    lease = _take(cache, plan, acquire)
    if earlier is not None:
        lease.device_tokens, lease.fetched_any = earlier.device_tokens, earlier.fetched_any
    cache.leases.add(lease)
    if plan.boundary > plan.found.usable_pages:
        if earlier is None:
            lease.device_tokens = plan.found.usable_pages * cache.layout.page_tokens
        return _grant(cache, lease, plan, fetches=fetching.start(cache, lease, plan))
    return _admit(cache, lease, plan)


def _admit(cache: DeviceCache, lease: Lease, plan: Plan) -> Grant:
    """Admits the sequence: counts it, and offers the snapshots of its first chunk."""
    num_tokens = len(lease.prompt) // TOKEN_BYTES
    for group in cache.sparse:
        group.admit(lease)
    lease.room_tokens = lease.computed_tokens
    room_tokens = lease.room_tokens + (lease.chunk_tokens or num_tokens)
    if room_tokens > num_tokens:
        room_tokens = num_tokens
    snapshots: list[StateSlot] = []
    for group in cache.sparse:
        snapshots += group.offer(lease, room_tokens)
    lease.room_tokens = room_tokens
    grant = _grant(cache, lease, plan, tuple(snapshots))
    counters = cache.counters
    counters.prompt += num_tokens
    counters.matched += grant.match.matched_tokens
    counters.cached += grant.cached_tokens
    counters.fetched += grant.fetched_tokens
    for group in cache.sparse:
        if group.spec.name == grant.match.limiting_group:
            group.limited_tokens += grant.match.matched_tokens - grant.match.usable_tokens
    reason = grant.match.miss_reason
    if reason in (MissReason.FETCH_SLOWER, MissReason.FETCH_BUSY, MissReason.BREAKER_OPEN):
        counters.declined += grant.match.host_tokens
    counters.misses[reason] = counters.misses.get(reason, 0) + 1
    return grant


def _take(cache: DeviceCache, plan: Plan, acquire: Acquire) -> Lease:
    tree = cache.tree
    sequence_id, namespace, tokens, _, chunk_tokens, priority, _, bypass, leave_at = acquire
    node = tree.node_at(plan.place)
    if node.parent is None:  # without a cached page the walk began at a root that is not in the tree
        node = tree.root(namespace)
    tree.pin(node)
    if cache.host is not None:
        renewal.note_hit(cache, node)
    if cache.marks_uses or priority:
        _mark_use(cache, node, priority)
    holds: list[Any] = [None] * len(cache.groups)
    lease = Lease(sequence_id, namespace, tokens, node, plan.base, plan.total, holds, priority, chunk_tokens, bypass)
    lease.computed_tokens = plan.boundary * cache.layout.page_tokens
    lease.resumed_pages, lease.matched_pages = plan.boundary, plan.found.matched_pages
    if leave_at:
        lease.want(leave_at, cache.layout.page_tokens)
    num_pages = plan.total - plan.base
    cache.make_room(num_pages)  # the pages that the plan reuses belong to pinned nodes
    for group in cache.groups:
        group.take(lease, plan.needs, num_pages)
    return lease


def _mark_use(cache: DeviceCache, node: Node, priority: int) -> None:
    """Counts a use of every node on the path. They are pinned, so in no order: their place in it may change."""
    selective = cache.host is not None and cache.config.spill is SpillPolicy.SELECTIVE
    step = node
    while step.parent is not None:
        cache.policy.used(step)
        step.uses += 1
        step.priority = max(step.priority, priority)
        if selective and step.spilled < step.resident:
            cache.spill_queue[step] = None
        step = step.parent


def _grant(
    cache: DeviceCache,
    lease: Lease,
    plan: Plan,
    snapshots: tuple[StateSlot, ...] = (),
    fetches: tuple[Transfer, ...] = (),
) -> Grant:
    page_tokens = cache.layout.page_tokens
    usable = (plan.found.usable_pages if fetches else plan.boundary) * page_tokens
    fetched = max(usable - lease.device_tokens, 0) if lease.fetched_any else 0
    match = match_of(plan, page_tokens)
    grant = Grant(
        lease.sequence_id, usable, usable - fetched, fetched, tables(cache, lease), match, fetches, (), snapshots
    )
    for group in cache.sparse:
        grant = group.describe(grant, lease)
        cache.trim_emptied(group)
    return grant


def tables(cache: DeviceCache, lease: Lease) -> tuple[GroupPages, ...]:
    """Returns the block tables from page 0 on."""
    out = []
    for group in cache.groups:
        table = group.table(lease)
        if table is not None:
            out.append(table)
    return tuple(out)


def plan_again(cache: DeviceCache, lease: Lease) -> Grant | Refusal:
    """Plans a lease anew after the acks of its fetches; a refusal ends it."""
    drop_holdings(cache, lease)
    cache.leases.remove(lease.sequence_id)
    page_tokens = cache.layout.page_tokens
    acquire = Acquire(
        sequence_id=lease.sequence_id,
        namespace=lease.namespace,
        tokens=lease.prompt,
        chunk_tokens=lease.chunk_tokens,
        priority=lease.priority,
        leave_at=tuple([boundary * page_tokens for boundary in sorted(lease.leave_at)]),
    )
    if lease.hashes is not None:
        lease.hashes.reach.clear()  # the tier's rows have changed since
    plan = plan_acquire(cache, acquire, lease.may_fetch, lease.hashes)
    if isinstance(plan, Refusal):
        cache.counters.refusals += 1
        return plan
    return commit(cache, plan, acquire, lease)


# Extend.


def extend(cache: DeviceCache, lease: Lease, item: Extend) -> ExtendGrant | Refusal:
    total = -(-item.num_tokens // cache.layout.page_tokens)
    num_pages = total - lease.full_end
    if num_pages <= 0:
        if cache.layout.resumes_anywhere:  # every group holds as many pages
            return ExtendGrant(item.sequence_id, ())
        num_pages = 0
    needs: dict[int, Any] = {}
    for sparse in cache.sparse:
        needs[sparse.number] = sparse.more(lease, total)
    detail = lacks_pages(cache, needs, num_pages - cache.tree.evictable_pages)
    if detail is not None:
        never = next(filter(None, (group.never_extends(lease, total) for group in cache.groups)), None)
        cache.counters.refusals += 1
        reason = RefusalReason.NEVER_FITS if never else RefusalReason.NO_ROOM
        return Refusal(item.sequence_id, reason, never or detail)
    cache.make_room(num_pages)
    pages: list[GroupPages] = []
    for group in cache.groups:
        gained = group.extend(lease, needs, num_pages)
        if gained is not None:
            pages.append(gained)
    lease.full_end += num_pages
    if item.leave_at:
        lease.want(item.leave_at, cache.layout.page_tokens)
    snapshots: list[StateSlot] = []
    for sparse in cache.sparse:
        snapshots += sparse.offer(lease, item.num_tokens)
        cache.trim_emptied(sparse)
    if item.num_tokens > lease.room_tokens:
        lease.room_tokens = item.num_tokens
    return ExtendGrant(item.sequence_id, tuple(pages), tuple(snapshots))


def shrink(cache: DeviceCache, lease: Lease, num_tokens: int) -> None:
    """Keeps the pages of the first `num_tokens` tokens; the others become free.

    step_check.py has checked that `num_tokens` is no less than the lease's own tokens. Slots that are reserved for
    snapshots stay.
    """
    total = -(-num_tokens // cache.layout.page_tokens)
    if total < lease.full_end:
        for group in cache.groups:
            group.shrink(lease, total)
        lease.full_end = total
    if num_tokens < lease.room_tokens:
        lease.room_tokens = num_tokens


# Release.


def release(cache: DeviceCache, lease: Lease, reason: ReleaseReason, rolling_tokens: int = 0) -> None:
    """`rolling_tokens`: the boundary whose state the rolling slots hold; 0: none."""
    kept = None
    if lease.fetches:
        kept = fetching.orphan(cache, lease)
    elif rolling_tokens and reason is not ReleaseReason.ABORTED:
        for group in cache.sparse:
            publishing.queue_spills(cache, group.finish(lease, rolling_tokens // cache.layout.page_tokens))
    drop_holdings(cache, lease, kept)
    cache.leases.remove(lease.sequence_id)


def drop_holdings(cache: DeviceCache, lease: Lease, kept: Mapping[int, Collection[int]] | None = None) -> None:
    """Gives up all that the lease still holds, but what tickets keep; what is unpublished is freed."""
    for group in cache.groups:
        held = group.held(lease)
        if kept is not None and group.number in kept:
            held = pack(page_id for page_id in unpack(held) if page_id not in kept[group.number])
        group.drop(held)
    cache.unpin(lease.node)
