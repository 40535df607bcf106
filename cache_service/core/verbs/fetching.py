"""Fetch tickets: what to bring from the host tier, and what an ack makes findable.

While the lease lives it holds the targets. If it ends first, each open ticket takes its own over until its ack, since
the mover may still write there.

    page     base                                            boundary
      |  resident  |  ticket 7  |  ticket 8  |  ticket 9  |  next round |
"""

from __future__ import annotations

from collections.abc import Iterable

from cache_service.core.device.lease_table import Arrival, Lease
from cache_service.core.device.page_pool import pack
from cache_service.core.device.transfer_table import Fetch
from cache_service.core.device_cache import DeviceCache
from cache_service.core.host.host_key import key_prefix
from cache_service.core.kinds.group import present
from cache_service.core.verbs import fetch_policy, publishing
from cache_service.core.verbs.admission import Plan
from session.messages import Ack
from session.words import PAGE_ID_BYTES, GroupPages, MissReason, Transfer, TransferPages, TransferStatus, WorkerId


def start(cache: DeviceCache, lease: Lease, plan: Plan) -> tuple[Transfer, ...]:
    """Opens tickets for consecutive runs of pages, the first run first; the lease waits for all their acks.

    One sequence takes at most half of the tickets that are left, so that others can fetch beside it. What lies beyond
    is fetched by the plan that follows the acks.
    """
    targets = [group.targets(lease, plan.needs, plan.boundary) for group in cache.groups]
    step = cache.config.transfer_pages
    room = max(1, (cache.config.max_open_tickets - cache.transfers.num_fetching) // 2)
    if fetch_policy.is_trial(cache):
        room = 1
    transfers: list[Transfer] = []
    for first in range(min(map(_first_page, targets)), plan.boundary, step):
        if len(transfers) == room:
            break
        pages = range(first, min(first + step, plan.boundary))
        moved = [(target.group, _cut(target, pages)) for target in targets]
        moved = [(group, page_ids) for group, page_ids in moved if any(page_ids)]
        if moved:
            transfers.append(_open(cache, lease, plan, pages, moved))
    lease.hashes = plan.found.hashes
    return tuple(transfers)


def _open(cache: DeviceCache, lease: Lease, plan: Plan, pages: range, moved: list[tuple[int, bytes]]) -> Transfer:
    assert cache.host is not None and plan.found.hashes is not None
    hashes = b"".join(plan.found.hashes.run(pages.start, pages.stop))
    fingerprint = cache.host.fingerprint
    groups = (TransferPages(group, ids, key_prefix(fingerprint, group), hashes) for group, ids in moved)
    transfer = Transfer(cache.transfers.new_id(), tuple(groups), pages.start, len(pages))
    lease.fetches |= {transfer.ticket}
    cache.transfers.fetched_ms = cache.now_ms
    cache.transfers.fetches[transfer.ticket] = Fetch(transfer, lease.sequence_id, cache.host, cache.now_ms)
    return transfer


def _first_page(target: GroupPages) -> int:
    """Returns the page number of its first page that is no hole; the end where all are."""
    num_zeros = len(target.page_ids) - len(target.page_ids.lstrip(b"\0"))
    return target.first_page + num_zeros // PAGE_ID_BYTES


def _cut(target: GroupPages, pages: range) -> bytes:
    """Returns the packed ids of these pages, with holes before the target's first one."""
    holes = max(target.first_page - pages.start, 0)
    first, end = pages.start + holes - target.first_page, max(pages.stop - target.first_page, 0)
    return bytes(min(holes, len(pages)) * PAGE_ID_BYTES) + target.page_ids[first * PAGE_ID_BYTES : end * PAGE_ID_BYTES]


def orphan(cache: DeviceCache, lease: Lease) -> dict[int, set[int]]:
    """Ends a lease's fetch before its acks: the open tickets keep their targets. Returns these, by group."""
    kept: dict[int, set[int]] = {}
    for ticket in lease.fetches:
        fetch = cache.transfers.fetches[ticket]
        fetch.orphaned = True
        for row in fetch.transfer.groups:
            kept.setdefault(row.group, set()).update(present(row.page_ids))
    return kept


def acknowledge(cache: DeviceCache, ack: Ack, now_ms: int) -> Lease | None:
    """Returns the lease that waited when this was its last ack, to be planned again; its done pages are published."""
    fetch = cache.transfers.fetches.pop(ack.ticket)
    cache.transfers.late.discard(ack.ticket)
    _report(cache.worker_id, fetch, ack, now_ms)
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
    """Counts fetches without an ack for too long as failures of their worker; others take their places.

    Its pages stay with it until its ack: the worker may still write there.
    """
    transfers = cache.transfers
    for ticket, fetch in transfers.fetches.items():  # the oldest first
        if now_ms - fetch.opened_ms < cache.config.max_spill_ms:
            return
        if ticket not in transfers.late:
            transfers.late.add(ticket)
            fetch.host.index.readers.failed(cache.worker_id, now_ms)


def _leading(arrived: Iterable[Arrival]) -> int:
    """Returns the page number behind the pages that arrived without a gap."""
    done = 0
    for fetch, num_done in arrived:
        done = fetch.transfer.first_page + num_done
        if num_done < fetch.transfer.num_pages:
            break
    return done


def _report(worker_id: WorkerId, fetch: Fetch, ack: Ack, now_ms: int) -> None:
    index, fingerprint = fetch.host.index, fetch.host.fingerprint
    index.counters.fetched += ack.num_done
    if ack.status is TransferStatus.FAILED:
        index.readers.failed(worker_id, now_ms)
        return
    index.readers.succeeded(worker_id)
    if ack.num_done < fetch.transfer.num_pages:
        is_corrupt = ack.status is TransferStatus.CORRUPT
        index.counters.corrupt += is_corrupt
        index.counters.missing += not is_corrupt
        why = MissReason.DAMAGED if is_corrupt else MissReason.LOST
        # A worker's own memory drops the ends of prompts first, and tells nobody: what is behind has gone as well.
        end = ack.num_done + 1 if is_corrupt or index.shared else fetch.transfer.num_pages
        for page_hash in fetch.hashes(end)[ack.num_done :]:
            index.forget(fingerprint, page_hash, why)


def _touch(arrived: list[Arrival]) -> None:
    """Marks the rows as used: all runs at once, since tails go before heads whatever order the acks came in."""
    for fetch, num_done in reversed(arrived):
        fetch.host.index.touch(fetch.host.fingerprint, fetch.hashes(num_done))


def free_targets(cache: DeviceCache, fetch: Fetch) -> None:
    """Frees what an orphaned ticket held."""
    for row in fetch.transfer.groups:
        cache.groups[row.group].drop(pack(present(row.page_ids)))


def _publish_done(cache: DeviceCache, lease: Lease, fetches: list[Fetch], done: int) -> None:
    if done > lease.published_pages:
        publishing.publish_pages(cache, lease, done)
    end = min(done, lease.published_pages)
    for transfer in (fetch.transfer for fetch in fetches):
        for row in transfer.groups:
            group = cache.groups[row.group]
            publishing.queue_spills(cache, group.arrive(lease, row.page_ids, transfer.first_page, end))
