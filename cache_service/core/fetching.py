"""Fetch tickets: what to bring from the host tier, and what an ack makes findable.

Knows no rates and no breaker rule beyond reporting to it. While the lease lives it holds the targets; if it ends first,
the ticket takes them over until its ack, since the mover may still write there.
"""

from __future__ import annotations

from cache_service.core import publishing
from cache_service.core.admission import Plan
from cache_service.core.device_cache import DeviceCache
from cache_service.core.lease_table import Lease, LeaveSlot
from cache_service.core.page_pool import pack
from cache_service.core.sparse_pages import Rank
from cache_service.core.transfer_table import Fetch, SparsePage
from cache_service.core.types import (
    NO_PAGE,
    PAGE_ID_BYTES,
    Ack,
    PageHash,
    Transfer,
    TransferPages,
    TransferStatus,
)


def start(cache: DeviceCache, lease: Lease, plan: Plan) -> Transfer:
    """Open the ticket; the lease waits for its ack."""
    assert cache.host is not None
    sparse = _sparse_targets(cache, lease, plan)
    full = range(plan.base, plan.boundary) if plan.boundary > plan.survey.matched else range(0)
    first = min((target.page for target in sparse), default=plan.boundary)
    first = min(first, full.start) if full else first
    num_pages = plan.boundary - first
    ids: dict[int, list[int]] = {}
    for group in cache.layout.full if full else ():
        ids[group] = [NO_PAGE] * (plan.base - first) + _full_targets(lease, group, len(full))
    for target in sparse:
        row = ids.setdefault(target.group, [NO_PAGE] * num_pages)
        row[target.page - first] = target.page_id
    hashes = tuple(PageHash(plan.survey.hash_of(page)) for page in range(first, plan.boundary))
    transfer = Transfer(
        ticket=cache.transfers.new_id(),
        groups=tuple(_pages(cache, group, ids[group], hashes) for group in sorted(ids)),
        first_page=first,
        num_pages=num_pages,
    )
    lease.fetch = transfer.ticket
    cache.transfers.fetches[transfer.ticket] = Fetch(
        transfer, lease.sequence_id, num_full=len(full), hashes=hashes, sparse=sparse
    )
    return transfer


def _full_targets(lease: Lease, group: int, count: int) -> list[int]:
    packed = memoryview(lease.private[group])[: count * PAGE_ID_BYTES]
    return packed.cast("I").tolist()


def _sparse_targets(cache: DeviceCache, lease: Lease, plan: Plan) -> tuple[SparsePage, ...]:
    targets = []
    for group, window in plan.windows.items():
        hold = lease.windows[group]
        for page in range(window.first, plan.boundary):
            if page not in window.hits:
                targets.append(SparsePage(group, page, hold.page_ids[page - hold.first]))
    for group, slot in plan.snapshots.items():
        if not slot:
            taken = cache.sparse[group].take(1)[0]
            lease.leave += (LeaveSlot(group, plan.boundary, taken),)
            targets.append(SparsePage(group, plan.boundary - 1, taken))
    return tuple(targets)


def _pages(cache: DeviceCache, group: int, ids: list[int], hashes: tuple[PageHash, ...]) -> TransferPages:
    assert cache.host is not None
    index, fingerprint = cache.host.index, cache.host.fingerprint
    keys = (index.key_of(fingerprint, group, h) if i else b"" for i, h in zip(ids, hashes, strict=True))
    return TransferPages(group, pack(ids), tuple(keys))


def orphan(cache: DeviceCache, lease: Lease) -> None:
    """The lease ends before its ack: the ticket keeps the targets."""
    assert lease.fetch is not None
    fetch = cache.transfers.fetches[lease.fetch]
    fetch.orphaned = True
    for group in cache.layout.full:
        size = fetch.num_full * PAGE_ID_BYTES
        fetch.full_targets[group] = bytes(lease.private[group][:size])
        del lease.private[group][:size]
    kept = {(target.group, target.page_id) for target in fetch.sparse}
    for group, hold in lease.windows.items():
        hold.page_ids = [page_id for page_id in hold.page_ids if (group, page_id) not in kept]
    lease.leave = tuple(leave for leave in lease.leave if (leave.group, leave.slot) not in kept)


def acknowledge(cache: DeviceCache, ack: Ack, now_ms: int) -> Lease | None:
    """Publish the done pages and forget the missing row; answers the lease that waited, to be planned again."""
    fetch = cache.transfers.fetches.pop(ack.ticket)
    _report(cache, fetch, ack, now_ms)
    if fetch.orphaned:
        free_targets(cache, fetch)
        return None
    lease = cache.leases[fetch.sequence_id]
    lease.fetch = None
    _publish_done(cache, lease, fetch, fetch.transfer.first_page + ack.num_done)
    lease.fetched_any = lease.fetched_any or ack.num_done > 0
    return lease


def _report(cache: DeviceCache, fetch: Fetch, ack: Ack, now_ms: int) -> None:
    assert cache.host is not None
    index, fingerprint = cache.host.index, cache.host.fingerprint
    index.touch(fingerprint, fetch.hashes[: ack.num_done])
    index.counters.fetched += ack.num_done
    if ack.status is TransferStatus.FAILED:
        index.breaker.failed(now_ms)
        return
    index.breaker.succeeded()
    if ack.num_done < fetch.transfer.num_pages:
        index.counters.missing += 1
        index.forget(fingerprint, fetch.hashes[ack.num_done])


def free_targets(cache: DeviceCache, fetch: Fetch) -> None:
    """What an orphaned ticket held."""
    for group, page_ids in fetch.full_targets.items():
        cache.pools[group].give(page_ids)
    for target in fetch.sparse:
        cache.sparse[target.group].drop((target.page_id,), Rank.WARM)


def _publish_done(cache: DeviceCache, lease: Lease, fetch: Fetch, done: int) -> None:
    if done > lease.published and (fetch.num_full or not cache.layout.full):
        publishing.publish_pages(cache, lease, done)
    slots = {leave.slot for leave in lease.leave}
    for target in fetch.sparse:
        if target.page >= min(done, lease.published):
            continue
        if target.group in cache.layout.state and target.page_id in slots:
            publishing.publish_slot(cache, lease.node, target.group, target.page + 1, target.page_id)
            lease.leave = tuple(leave for leave in lease.leave if leave.group != target.group)
        else:
            publishing.fill_hole(cache, lease.node, target)
