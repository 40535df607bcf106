"""Give a sequence its pages and take them back: acquire, extend, release, and the new plan after a fetch.

A commit pins the hits, then evicts, then takes; it cannot fail.
"""

from __future__ import annotations

from cache_service.core.base.types import SpillPolicy
from cache_service.core.device.device_cache import DeviceCache
from cache_service.core.device.lease_table import HeldSlot, Lease, LeaveSlot, WindowHold
from cache_service.core.device.page_pool import pack
from cache_service.core.device.radix_node import Node
from cache_service.core.device.sparse_pages import Rank
from cache_service.core.verbs import fetching, publishing, renewal
from cache_service.core.verbs.admission import Plan, lacks_for_extend, match_of, plan_acquire
from session.messages import Acquire, Extend, ExtendGrant, Grant, Refusal
from session.words import (
    PAGE_ID_BYTES,
    TOKEN_BYTES,
    GroupPages,
    PageId,
    RefusalReason,
    ReleaseReason,
    SnapshotSlot,
    Transfer,
)

# Acquire.


def acquire(cache: DeviceCache, item: Acquire) -> Grant | Refusal:
    plan = plan_acquire(cache, item, may_fetch=True)
    if isinstance(plan, Refusal):
        cache.counters.refusals += 1
        return plan
    return commit(cache, plan, item, None)


def commit(cache: DeviceCache, plan: Plan, acquire: Acquire, earlier: Lease | None) -> Grant:
    """Carry the plan out; `earlier` is the lease that waited for a fetch, if this is a new plan after its ack."""
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
    """The sequence may run now: count it, and offer the snapshots of its first chunk."""
    num_tokens = len(lease.prompt) // TOKEN_BYTES
    leave: tuple[SnapshotSlot, ...] = ()
    if cache.sparse:
        _take_rolling(cache, lease)
        lease.room_tokens = plan.boundary * cache.layout.page_tokens
        leave = _offer_leave(cache, lease, min(num_tokens, lease.room_tokens + (lease.chunk_tokens or num_tokens)))
    grant = _grant(cache, lease, plan, leave)
    counters = cache.counters
    counters.prompt += num_tokens
    counters.matched += grant.match.matched_tokens
    counters.cached += grant.cached_tokens
    counters.fetched += grant.fetched_tokens
    reason = grant.match.miss_reason
    counters.misses[reason] = counters.misses.get(reason, 0) + 1
    return grant


def _take(cache: DeviceCache, plan: Plan, acquire: Acquire) -> Lease:
    tree = cache.tree
    sequence_id, namespace, tokens, _, chunk_tokens, priority, _, bypass = acquire
    node = tree.node_at(plan.place)
    if node.parent is None:  # a prompt of which nothing is cached may have met a stand-in for its root
        node = tree.root(namespace)
    tree.pin(node)
    if cache.host is not None:
        renewal.note_hit(cache, node)
    if cache.marks_uses or priority:
        _mark_use(cache, node, priority)
    private = [bytearray()] * len(cache.layout.specs)
    lease = Lease(sequence_id, namespace, tokens, node, plan.base, plan.total, private, priority, chunk_tokens, bypass)
    lease.computed_tokens = plan.boundary * cache.layout.page_tokens
    if cache.sparse:
        _read_hits(cache, lease, plan)
    need = plan.total - plan.base
    cache.make_room(need)
    for group, pool in cache.full_pools:
        private[group] = bytearray(pool.take(need))
    if cache.sparse:
        _take_sparse(cache, lease, plan)
    return lease


def _read_hits(cache: DeviceCache, lease: Lease, plan: Plan) -> None:
    """What the plan reuses is read before anything is evicted."""
    lease.resumed_pages, lease.matched_pages = plan.boundary, plan.found.matched_pages
    for group, window in plan.windows.items():
        cache.sparse[group].read(window.hits.values())
    lease.restore = tuple(HeldSlot(group, slot) for group, slot in plan.snapshots.items() if slot)
    for held in lease.restore:
        cache.sparse[held.group].read((held.slot,))


def _take_sparse(cache: DeviceCache, lease: Lease, plan: Plan) -> None:
    lease.windows = {group: _take_window(cache, group, plan) for group in cache.layout.window}
    lease.working = tuple(HeldSlot(group, cache.sparse[group].take(1)[0]) for group in cache.layout.state)


def _take_window(cache: DeviceCache, group: int, plan: Plan) -> WindowHold:
    window = plan.windows[group]
    fresh = iter(cache.sparse[group].take(window.fresh))
    ids = [window.hits.get(page) or next(fresh) for page in range(window.first, window.end)]
    cache.trim_all()
    return WindowHold(window.first, ids)


def _mark_use(cache: DeviceCache, node: Node, priority: int) -> None:
    """Everything on the path was used again; pinned nodes stand in no order, so their rank may change."""
    selective = cache.host is not None and cache.config.spill is SpillPolicy.SELECTIVE
    step = node
    while step.parent is not None:
        cache.policy.used(step)
        step.uses += 1
        step.priority = max(step.priority, priority)
        if selective and step.spilled < step.resident:
            cache.spill_queue[step] = None
        step = step.parent


def _take_rolling(cache: DeviceCache, lease: Lease) -> None:
    if lease.bypass:
        return
    for group in cache.layout.state:
        if cache.sparse[group].num_available:
            lease.rolling += (HeldSlot(group, cache.sparse[group].take(1)[0]),)
    cache.trim_all()


def _offer_leave(cache: DeviceCache, lease: Lease, room: int) -> tuple[SnapshotSlot, ...]:
    """Slots for the wanted boundaries in (lease.room_tokens, room], while there are any; too few refuse nothing."""
    if room <= lease.room_tokens:
        return ()
    page_tokens = cache.layout.page_tokens
    wanted = set(lease.resume_boundaries(page_tokens, lease.matched_pages))
    offered = []
    for boundary in sorted(wanted) if not lease.bypass else ():
        if not lease.room_tokens < boundary * page_tokens <= room:
            continue
        for group in cache.layout.state:
            if cache.sparse[group].num_available:
                slot = cache.sparse[group].take(1)[0]
                lease.leave += (LeaveSlot(group, boundary, slot),)
                offered.append(SnapshotSlot(group, boundary * page_tokens, PageId(slot)))
    lease.room_tokens = room
    cache.trim_all()
    return tuple(offered)


def _grant(
    cache: DeviceCache,
    lease: Lease,
    plan: Plan,
    leave: tuple[SnapshotSlot, ...] = (),
    fetches: tuple[Transfer, ...] = (),
) -> Grant:
    layout, match = cache.layout, match_of(plan, cache.layout)
    usable = (plan.found.usable_pages if fetches else plan.boundary) * layout.page_tokens
    fetched = max(usable - lease.device_tokens, 0) if lease.fetched_any else 0
    cached = usable - fetched
    if not layout.state:
        return Grant(lease.sequence_id, usable, cached, fetched, tables(cache, lease), match, fetches)
    return Grant(
        sequence_id=lease.sequence_id,
        usable_tokens=usable,
        cached_tokens=cached,
        fetched_tokens=fetched,
        tables=tables(cache, lease),
        match=match,
        fetches=fetches,
        restore=() if fetches else _slots(lease.restore, usable),
        leave=leave,
        working=_slots(lease.working, usable),
        rolling=_slots(lease.rolling, usable),
    )


def _slots(held: tuple[HeldSlot, ...], boundary: int) -> tuple[SnapshotSlot, ...]:
    return tuple(SnapshotSlot(slot.group, boundary, PageId(slot.slot)) for slot in held)


def tables(cache: DeviceCache, lease: Lease) -> tuple[GroupPages, ...]:
    """Block tables from page 0 on; NO_PAGE where a window no longer reaches."""
    out = []
    for group in cache.layout.full:
        out.append(GroupPages(group, 0, _page_ids(lease, group)))
    if lease.windows:
        for group, hold in lease.windows.items():
            out.append(GroupPages(group, 0, bytes(hold.first * PAGE_ID_BYTES) + pack(hold.page_ids)))
        out.sort()
    return tuple(out)


def _page_ids(lease: Lease, group: int) -> bytes:
    """The shared pages of the path, then the lease's own."""
    parts: list[bytes | bytearray] = [lease.private[group]]
    node: Node | None = lease.node
    while node is not None:
        parts.append(node.pages[group])
        node = node.parent
    parts.reverse()
    return b"".join(parts)


def plan_again(cache: DeviceCache, lease: Lease) -> Grant | Refusal:
    """After the acks of its fetches, from the tokens that the lease keeps; a refusal ends it."""
    drop_holdings(cache, lease)
    cache.leases.remove(lease.sequence_id)
    acquire = Acquire(
        lease.sequence_id, lease.namespace, lease.prompt, chunk_tokens=lease.chunk_tokens, priority=lease.priority
    )
    if lease.hashes is not None:
        lease.hashes.reach.clear()  # rows have come and gone since
    plan = plan_acquire(cache, acquire, lease.may_fetch, lease.hashes)
    if isinstance(plan, Refusal):
        cache.counters.refusals += 1
        return plan
    return commit(cache, plan, acquire, lease)


# Extend.


def extend(cache: DeviceCache, lease: Lease, item: Extend) -> ExtendGrant | Refusal:
    layout, held = cache.layout, lease.full_end
    total = -(-item.num_tokens // layout.page_tokens)
    if total <= held and not layout.sparse:
        return ExtendGrant(item.sequence_id, ())
    detail = lacks_for_extend(cache, lease, total)
    if detail is not None:
        never = _can_never_extend(cache, lease, total)
        cache.counters.refusals += 1
        reason = RefusalReason.NEVER_FITS if never else RefusalReason.NO_ROOM
        return Refusal(item.sequence_id, reason, never or detail)
    pages = []
    if total > held and layout.full:
        lease.full_end = total
        cache.make_room(total - held)
        for group, pool in cache.full_pools:
            taken = pool.take(total - held)
            lease.private[group] += taken
            pages.append(GroupPages(group, held, taken))
    if not layout.sparse:
        return ExtendGrant(item.sequence_id, tuple(pages))
    for group, hold in lease.windows.items():
        if total > hold.end:
            ids = cache.sparse[group].take(total - hold.end)
            pages.append(GroupPages(group, hold.end, pack(ids)))
            hold.page_ids += ids
    cache.trim_all()
    pages.sort()
    return ExtendGrant(item.sequence_id, tuple(pages), _offer_leave(cache, lease, item.num_tokens))


def _can_never_extend(cache: DeviceCache, lease: Lease, total: int) -> str | None:
    """Returns why the sequence could not grow on an empty worker either; None when it could."""
    for group in (*cache.layout.full, *lease.windows):
        rule, hold = cache.layout.rules[group], lease.windows.get(group)
        # A launch from the last extend's end on reads what its rule says from there.
        first = max(hold.first if hold is not None else 0, rule.first_page(lease.room_tokens))
        if total - first > rule.spec.num_pages:
            return f"{total - first} pages at once; group {rule.spec.name} has {rule.spec.num_pages}"
    return None


# Release.


def release(cache: DeviceCache, lease: Lease, reason: ReleaseReason, rolling_tokens: int = 0) -> None:
    """`rolling_tokens`: the boundary whose state the rolling slots hold; 0: none."""
    if lease.fetches:
        fetching.orphan(cache, lease)
    elif lease.rolling and rolling_tokens and reason is ReleaseReason.FINISHED:
        publishing.publish_rolling(cache, lease, rolling_tokens // cache.layout.page_tokens)
    drop_holdings(cache, lease)
    cache.leases.remove(lease.sequence_id)


def drop_holdings(cache: DeviceCache, lease: Lease) -> None:
    """Everything that the lease still holds; what is unpublished is freed."""
    for group, pool in cache.full_pools:
        pool.give(lease.private[group])
    if cache.sparse:
        _drop_sparse(cache, lease)
    cache.unpin(lease.node)


def _drop_sparse(cache: DeviceCache, lease: Lease) -> None:
    for group, hold in lease.windows.items():
        cache.sparse[group].drop(hold.page_ids, Rank.WARM)
    for held in (*lease.working, *lease.rolling, *lease.restore):
        cache.sparse[held.group].drop((held.slot,), Rank.WARM)
    for leave in lease.leave:
        cache.sparse[leave.group].drop((leave.slot,), Rank.WARM)
