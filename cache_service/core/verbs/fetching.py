"""Fetch tickets: what to bring from the host tier, and what an ack makes findable.

While the lease lives it holds the targets; if it ends first,
each open ticket takes its own over until its ack, since the mover may still write there.

    page     base                                            boundary
      |  resident  |  ticket 7  |  ticket 8  |  ticket 9  |  next round |
"""

from __future__ import annotations

from collections.abc import Iterable

from cache_service.core.device.device_cache import DeviceCache
from cache_service.core.device.lease_table import Arrival, Lease, LeaveSlot
from cache_service.core.device.page_pool import pack
from cache_service.core.device.sparse_pages import Rank
from cache_service.core.device.transfer_table import Fetch, SparsePage
from cache_service.core.verbs import publishing
from cache_service.core.verbs.admission import Plan
from session.messages import Ack
from session.words import NO_PAGE, PAGE_ID_BYTES, Transfer, TransferPages, TransferStatus


def start(cache: DeviceCache, lease: Lease, plan: Plan) -> tuple[Transfer, ...]:
    """Open tickets for consecutive runs of pages, the first run first; the lease waits for all their acks.

    One sequence takes at most half of the tickets that are left, so that others can fetch beside it. What lies beyond
    is fetched by the plan that follows the acks.
    """
    sparse = _sparse_targets(cache, lease, plan)
    brings_full = cache.layout.full and plan.boundary > plan.found.matched_pages
    full = range(plan.base, plan.boundary) if brings_full else range(0)
    starts = [target.page for target in sparse] + ([full.start] if full else [])
    step = cache.config.transfer_pages
    room = max(1, (cache.config.max_open_tickets - cache.transfers.num_fetching) // 2)
    transfers: list[Transfer] = []
    for first in range(min(starts), plan.boundary, step):
        if len(transfers) == room:
            break
        pages = range(first, min(first + step, plan.boundary))
        mine = tuple(target for target in sparse if target.page in pages)
        moved = range(max(full.start, pages.start), min(full.stop, pages.stop)) if full else range(0)
        if mine or moved:
            transfers.append(_open(cache, lease, plan, pages, moved, mine))
    lease.hashes = plan.found.hashes
    return tuple(transfers)


def _open(
    cache: DeviceCache, lease: Lease, plan: Plan, pages: range, full: range, sparse: tuple[SparsePage, ...]
) -> Transfer:
    assert cache.host is not None and plan.found.hashes is not None
    ids: dict[int, bytes] = {}
    for group in cache.layout.full if full else ():
        targets = lease.private[group][_cut(full, lease.published_pages)]
        ids[group] = bytes((full.start - pages.start) * PAGE_ID_BYTES) + bytes(targets)
    rows: dict[int, list[int]] = {}
    for target in sparse:
        row = rows.setdefault(target.group, [NO_PAGE] * len(pages))
        row[target.page - pages.start] = target.page_id
    ids.update((group, pack(row)) for group, row in rows.items())
    hashes = b"".join(plan.found.hashes.run(pages.start, pages.stop))
    index, fingerprint = cache.host.index, cache.host.fingerprint
    groups = (TransferPages(g, ids[g], index.key_prefix(fingerprint, g), hashes) for g in sorted(ids))
    transfer = Transfer(cache.transfers.new_id(), tuple(groups), pages.start, len(pages))
    lease.fetches |= {transfer.ticket}
    cache.transfers.fetches[transfer.ticket] = Fetch(
        transfer, lease.sequence_id, cache.host, full, sparse, cache.now_ms
    )
    return transfer


def _cut(pages: range, first: int) -> slice:
    """Where these pages stand in packed ids that begin with page number `first`."""
    return slice((pages.start - first) * PAGE_ID_BYTES, (pages.stop - first) * PAGE_ID_BYTES)


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


def orphan(cache: DeviceCache, lease: Lease) -> None:
    """The lease ends before its acks: the open tickets keep their targets."""
    kept: set[tuple[int, int]] = set()
    fetches = [cache.transfers.fetches[ticket] for ticket in lease.fetches]
    for fetch in sorted(fetches, key=lambda fetch: -fetch.full.start):  # from behind, so that places stay true
        fetch.orphaned = True
        for group in cache.layout.full if fetch.full else ():
            cut = _cut(fetch.full, lease.published_pages)
            fetch.full_targets[group] = bytes(lease.private[group][cut])
            del lease.private[group][cut]
        kept |= {(target.group, target.page_id) for target in fetch.sparse}
    for group, hold in lease.windows.items():
        hold.page_ids = [page_id for page_id in hold.page_ids if (group, page_id) not in kept]
    lease.leave = tuple(leave for leave in lease.leave if (leave.group, leave.slot) not in kept)
    lease.fetches = frozenset()


def acknowledge(cache: DeviceCache, ack: Ack, now_ms: int) -> Lease | None:
    """Returns the lease that waited when this was its last ack, to be planned again; its done pages are published."""
    fetch = cache.transfers.fetches.pop(ack.ticket)
    cache.transfers.late.discard(ack.ticket)
    _report(fetch, ack, now_ms)
    if fetch.orphaned:
        _touch([Arrival(fetch, ack.num_done)])
        free_targets(cache, fetch)
        return None
    lease = cache.leases[fetch.sequence_id]
    lease.fetches -= {ack.ticket}
    lease.arrived += (Arrival(fetch, ack.num_done),)
    lease.may_fetch = lease.may_fetch and ack.status is not TransferStatus.FAILED
    if lease.fetches:
        return None
    arrived = sorted(lease.arrived, key=lambda arrival: arrival.fetch.transfer.first_page)
    lease.arrived = ()
    _touch(arrived)
    done = _leading(arrived)
    lease.fetched_any = lease.fetched_any or done > arrived[0].fetch.transfer.first_page
    _publish_done(cache, lease, [arrival.fetch for arrival in arrived], done)
    return lease


def note_late(cache: DeviceCache, now_ms: int) -> None:
    """A fetch that nobody acknowledged for too long is a failure of its tier, and leaves its place to another one.

    Its pages stay with it until its ack: the worker may still write there.
    """
    transfers = cache.transfers
    for ticket, fetch in transfers.fetches.items():  # the oldest first
        if now_ms - fetch.opened_ms < cache.config.max_spill_ms:
            return
        if ticket not in transfers.late:
            transfers.late.add(ticket)
            fetch.host.index.breaker.failed(now_ms)


def _leading(arrived: Iterable[Arrival]) -> int:
    """The page number behind the pages that arrived without a gap; nothing moves between two tickets."""
    done = 0
    for fetch, num_done in arrived:
        done = fetch.transfer.first_page + num_done
        if num_done < fetch.transfer.num_pages:
            break
    return done


def _report(fetch: Fetch, ack: Ack, now_ms: int) -> None:
    index, fingerprint = fetch.host.index, fetch.host.fingerprint
    index.counters.fetched += ack.num_done
    if ack.status is TransferStatus.FAILED:
        index.breaker.failed(now_ms)
        return
    index.breaker.succeeded()
    if ack.num_done < fetch.transfer.num_pages:
        if ack.status is TransferStatus.CORRUPT:
            index.counters.corrupt += 1
        else:
            index.counters.missing += 1
        index.forget(fingerprint, fetch.hashes(ack.num_done + 1)[-1])


def _touch(arrived: list[Arrival]) -> None:
    """All runs at once, since tails go before heads whatever order the acks came in."""
    for fetch, num_done in reversed(arrived):
        fetch.host.index.touch(fetch.host.fingerprint, fetch.hashes(num_done))


def free_targets(cache: DeviceCache, fetch: Fetch) -> None:
    """What an orphaned ticket held."""
    for group, page_ids in fetch.full_targets.items():
        cache.pools[group].give(page_ids)
    for target in fetch.sparse:
        cache.sparse[target.group].drop((target.page_id,), Rank.WARM)


def _publish_done(cache: DeviceCache, lease: Lease, fetches: list[Fetch], done: int) -> None:
    if done > lease.published_pages and (any(fetch.full for fetch in fetches) or not cache.layout.full):
        publishing.publish_pages(cache, lease, done)
    slots = {leave.slot for leave in lease.leave}
    for target in (target for fetch in fetches for target in fetch.sparse):
        if target.page >= min(done, lease.published_pages):
            continue
        if target.group in cache.layout.state and target.page_id in slots:
            publishing.publish_slot(cache, lease.node, target.group, target.page + 1, target.page_id)
            lease.leave = tuple(leave for leave in lease.leave if leave.group != target.group)
        else:
            publishing.fill_hole(cache, lease.node, target)
