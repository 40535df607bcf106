"""Spill orders: which resident pages the host tier lacks, what an ack records, and what a broken stream ends.

Best effort: eviction never waits for a spill. A ticket pins its node, and reads the pages of groups with holes that it
copies.
"""

from __future__ import annotations

from itertools import islice

from cache_service.core.device.page_pool import pack, unpack
from cache_service.core.device.radix_node import Node
from cache_service.core.device.transfer_table import Spill, SpillRow
from cache_service.core.device_cache import DeviceCache
from cache_service.core.host.host_key import key_prefix
from cache_service.core.verbs import renewal
from session.messages import Ack
from session.words import (
    HASH_BYTES,
    NO_PAGE,
    PAGE_ID_BYTES,
    PageHash,
    TicketId,
    Transfer,
    TransferPages,
    TransferStatus,
)

# Open spills may hold one page of a pool in this many.
SPILL_SHARE = 4

# The most nodes that are queued while a breaker is open; of more, those that were queued first are dropped.
MAX_QUEUED_NODES = 4_096


def next_orders(cache: DeviceCache) -> tuple[Transfer, ...]:
    """Returns new orders for the queued nodes, as many as tickets may be open."""
    queue = cache.spill_queue
    if not queue or cache.host is None:
        return ()
    breakers = cache.host.index.breaker, cache.spill_breaker
    if any(breaker.is_open for breaker in breakers):
        while len(queue) > MAX_QUEUED_NODES:
            queue.popitem(last=False)
        return ()
    if cache.host.fingerprint in cache.host.index.unscanned:
        return ()  # after a restart the store has most of them
    orders = []
    transfers = cache.transfers
    # After the pause one order tries whether the tier takes pages again.
    most = 1 if any(breaker.is_trying for breaker in breakers) else cache.config.max_open_tickets
    while queue and len(transfers.spills) < most and not _holds_much(cache):
        if len(transfers.abandoned) >= cache.config.max_open_tickets:
            break
        node = next(iter(queue))
        order = _next_order(cache, node)
        if order is None:
            queue.pop(node, None)
        else:
            orders.append(order)
    return tuple(orders)


def _holds_much(cache: DeviceCache) -> bool:
    """Returns whether open spills keep more than their share of a pool from eviction."""
    transfers = [spill.transfer for spill in cache.transfers.spills.values()]
    return any(
        sum(map(group.num_copied, transfers)) * SPILL_SHARE >= group.spec.num_pages
        for group in (cache.groups if transfers else ())
    )


def _next_order(cache: DeviceCache, node: Node) -> Transfer | None:
    """Returns the next order for a queued node, or for a node above it: of a node that was split only the lower half is
    queued."""
    path, above = [node], node.parent
    while above is not None and above.parent is not None:
        if above.spilled < above.resident and renewal.is_wanted(cache, above):
            path.append(above)
        above = above.parent
    for step in reversed(path):
        order = _order(cache, step)
        if order is not None:
            return order
    return None


def _order(cache: DeviceCache, node: Node) -> Transfer | None:
    """Returns an order for the next run of the node's pages that the tier lacks; moves the node's mark behind it."""
    rows = _lacking(cache, node)
    if not rows:
        return None
    first = min(rows)
    num_pages = max(rows) + 1 - first
    assert cache.host is not None
    index, fingerprint = cache.host.index, cache.host.fingerprint
    at, end = first - node.start, first - node.start + num_pages
    hashes = bytes(node.hashes[at * HASH_BYTES : end * HASH_BYTES])
    ordered = tuple(rows.get(page) for page in range(first, first + num_pages))
    groups = []
    for group, page_ids in enumerate(node.pages):
        standing = zip(ordered, unpack(page_ids[at * PAGE_ID_BYTES : end * PAGE_ID_BYTES]), strict=True)
        ids = [page_id if row is not None and row.groups >> group & 1 else NO_PAGE for row, page_id in standing]
        if any(ids):
            groups.append(TransferPages(group, pack(ids), key_prefix(fingerprint, group), hashes))
    transfer = Transfer(cache.transfers.new_id(), tuple(groups), first, num_pages)
    cache.transfers.spills[transfer.ticket] = Spill(transfer, node, ordered, cache.now_ms)
    for row in rows.values():
        index.begin(fingerprint, row.page_hash, row.groups)
    cache.tree.pin_for_ticket(node)
    for moved in transfer.groups:
        cache.groups[moved.group].begin_copy(moved.page_ids)
    return transfer


def _lacking(cache: DeviceCache, node: Node) -> dict[int, SpillRow]:
    """Returns the rows that the tier lacks by page number, at most one order's worth."""
    assert cache.host is not None
    index, fingerprint, layout = cache.host.index, cache.host.fingerprint, cache.layout
    if node.spilled >= node.resident or node.root in cache.tree.detached:
        return {}
    cache.tree.ensure_hashes(node)
    # Pages of a window of one token are never read again, from the boundary behind them on.
    sparse = {group.number: unpack(node.pages[group.number]) for group in cache.sparse if group.reach_pages()}
    rows: dict[int, SpillRow] = {}
    floor = index.cleared.floor(node.root.digest)
    for at in range(node.spilled, node.resident):
        if rows and node.start + at - min(rows) >= cache.config.transfer_pages:
            break
        node.spilled = at + 1
        page_hash = PageHash(bytes(node.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]))
        groups = layout.full_mask | sum(1 << group for group, ids in sparse.items() if ids[at])
        groups &= ~index.known(fingerprint, page_hash, floor)
        if groups and index.page_bytes(fingerprint, groups) <= index.quota.max_bytes:
            rows[node.start + at] = SpillRow(page_hash, groups)
    return rows


def acknowledge(cache: DeviceCache, ack: Ack, now_ms: int) -> None:
    """Adds rows for the leading done pages, and ends the ticket's hold on its pages."""
    assert cache.host is not None
    spill = cache.transfers.spills.pop(ack.ticket)
    index, fingerprint = cache.host.index, cache.host.fingerprint
    namespace = spill.node.root.namespace
    done = [row for row in spill.rows[: ack.num_done] if row is not None]
    _close(cache, spill)
    for row in reversed(done):
        index.add(fingerprint, row.page_hash, row.groups, namespace)
    # The store learns the order too, for a service that is started anew and reads it from the times to live.
    index.touch(fingerprint, [row.page_hash for row in done])
    index.counters.spilled += len(done)
    if done:
        renewal.note_spilled(cache, spill.node, spill.transfer.first_page)
    if ack.status is TransferStatus.FAILED:
        # Stops spills alone: a full store takes nothing, and what it has can be fetched.
        cache.spill_breaker.failed(now_ms)
        _unmark(spill, spill.transfer.first_page + ack.num_done)
    else:
        cache.spill_breaker.succeeded()
        index.breaker.succeeded()
    index.shrink()


def end_after_broken_stream(cache: DeviceCache) -> None:
    """Ends all spills after a broken stream: the worker's mover is drained, so no order of it is under way."""
    for ticket in list(cache.transfers.abandoned):
        forget_abandoned(cache, ticket)
    for ticket in list(cache.transfers.spills):
        spill = cache.transfers.spills.pop(ticket)
        _close(cache, spill)
        _unmark(spill, spill.transfer.first_page)
        if spill.node.resident:  # without a FULL group the unpinned node may have been trimmed
            cache.spill_queue[spill.node] = None


def abandon_overdue(cache: DeviceCache, now_ms: int) -> None:
    """Ends the hold on pages of spills that were not acknowledged for too long.

    The worker may read them later, when they hold something else, and write that under the old keys. So until its
    late ack, or its next Hello, these rows count as on their way: they are neither spilled nor findable.
    """
    while cache.transfers.spills:
        ticket, spill = next(iter(cache.transfers.spills.items()))  # the oldest
        if now_ms - spill.opened_ms < cache.config.max_spill_ms:
            return
        del cache.transfers.spills[ticket]
        _release(cache, spill)
        cache.transfers.abandoned[ticket] = spill


def forget_abandoned(cache: DeviceCache, ticket: TicketId) -> None:
    """Drops the keys of an abandoned spill, after its late ack or the end of the mover: no row stands for them."""
    spill = cache.transfers.abandoned.pop(ticket)
    _end_rows(cache, spill)
    _unmark(spill, spill.transfer.first_page)
    if spill.node.resident:
        cache.spill_queue[spill.node] = None
    else:  # its pages may have come back in another node, which passed them over as on their way
        renewal.start_refill(cache)
    _delete_rows(cache, spill)


def _delete_rows(cache: DeviceCache, spill: Spill) -> None:
    assert cache.host is not None
    for row in spill.rows:
        if row is not None:
            cache.host.index.delete(cache.host.fingerprint, row.page_hash, row.groups)


def _end_rows(cache: DeviceCache, spill: Spill) -> None:
    assert cache.host is not None
    for row in spill.rows:
        if row is not None:
            cache.host.index.end(cache.host.fingerprint, row.page_hash, row.groups)


def _close(cache: DeviceCache, spill: Spill) -> None:
    _end_rows(cache, spill)
    _release(cache, spill)


def _release(cache: DeviceCache, spill: Spill) -> None:
    for moved in spill.transfer.groups:
        cache.groups[moved.group].end_copy(moved.page_ids)
    cache.tree.unpin_for_ticket(spill.node)
    cache.trim(spill.node)


def _unmark(spill: Spill, page: int) -> None:
    """Lets pages from this one on be spilled again."""
    node: Node | None = spill.node
    while node is not None and node.end > page:
        node.spilled = min(node.spilled, max(page - node.start, 0))
        node = node.parent


def queue_cold_end(cache: DeviceCache) -> None:
    """Queues what would be evicted next, for write_back, while free pages are below the low-water mark."""
    low = cache.config.write_back_low_water
    if cache.host is None or all(pool.num_free >= pool.num_pages * low for pool in cache.pools.values()):
        return
    for node in islice(cache.policy.order(), cache.config.max_open_tickets):
        if node.spilled < node.resident:
            cache.spill_queue[node] = None


def end_all(cache: DeviceCache) -> None:
    """Ends the spills of a worker that is forgotten; changes nothing else in its cache."""
    for spill in cache.transfers.abandoned.values():
        _end_rows(cache, spill)
        _delete_rows(cache, spill)
    for spill in cache.transfers.spills.values():
        _end_rows(cache, spill)
    cache.transfers.abandoned.clear()
    cache.transfers.spills.clear()
