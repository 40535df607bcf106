"""Everything that decides what the manager does next, as values that can be compared.

Counters and the session's step id are left out, and hashes: these are a pure function of the path, filled in on demand.
"""

from __future__ import annotations

from cache_service.core.cache_manager import CacheManager
from cache_service.core.device.lease_table import Lease
from cache_service.core.device.radix_node import Node, Root
from cache_service.core.device_cache import DeviceCache
from session.words import TOKEN_BYTES
from tests.core.audit import nodes_of


def snapshot(manager: CacheManager) -> tuple[object, ...]:
    """Equal before and after whatever must change nothing."""
    workers = tuple((worker_id, _worker_state(worker.cache)) for worker_id, worker in manager.workers.items())
    tiers = tuple(
        (
            tuple((key, repr(row)) for key, row in index.rows.items()),
            tuple(index.pending.items()),
            repr(index.breaker),
            tuple(index.queues.deletes),
            tuple(index.queues.touches),
            (index.quota.num_held, index.quota.held_bytes, index.quota.reserved_bytes, tuple(index.group_bytes)),
        )
        for index in manager.tiers.all()
    )
    attachments = tuple(
        (
            number,
            repr(attachment.leases),
            repr(attachment.tickets),
            (attachment.last_lease, attachment.last_ticket),
            repr(attachment.view.index.readers.breakers[number]),
        )
        for number, attachment in manager.attachments.all.items()
    )
    return workers, tiers, attachments


def _worker_state(cache: DeviceCache) -> tuple[object, ...]:
    numbers: dict[Node, int] = {}
    for number, node in enumerate((*cache.tree.roots.values(), *cache.tree.detached, *nodes_of(cache))):
        numbers[node] = number
    tree = cache.tree
    return (
        tuple((_node_state(node), numbers.get(node.parent) if node.parent else None) for node in numbers),
        tuple(numbers[node] for node in cache.policy.order()),
        tree.ghosts.snapshot(),
        tuple(numbers.get(node) for node in cache.spill_queue),
        (repr(cache.spill_breaker), repr(cache.fetch_breaker)),
        (tree.num_nodes, tree.evictable_pages),
        tuple((pool.free_ids(), pool.fresh, pool.claimed_ahead) for pool in cache.pools.values()),
        tuple(
            (
                pages.pool.free_ids(),
                pages.pool.fresh,
                pages.pool.claimed_ahead,
                tuple(sorted(pages.readers.items())),
                repr(pages.order()),
            )
            for pages in (group.pages for group in cache.sparse)
        ),
        tuple(_lease_state(lease, numbers) for lease in cache.leases.all()),
        tuple(repr(fetch) for fetch in cache.transfers.fetches.values()),
        tuple((spill.transfer, numbers[spill.node], repr(spill.rows)) for spill in cache.transfers.spills.values()),
    )


def _node_state(node: Node) -> tuple[object, ...]:
    return (
        node.namespace if isinstance(node, Root) else None,
        node.start,
        bytes(node.key),
        tuple(bytes(pages) for pages in node.pages),
        (node.resident, node.pins, node.ticket_pins, node.uses, node.priority),
        (node.spilled, node.soft_until_ms, node.used_at),
    )


def _lease_state(lease: Lease, numbers: dict[Node, int]) -> tuple[object, ...]:
    return (
        lease.sequence_id,
        lease.namespace,
        lease.tokens(0, lease.num_tokens * TOKEN_BYTES),
        numbers[lease.node],
        (
            lease.published_pages,
            lease.computed_tokens,
            lease.priority,
            lease.room_tokens,
            sorted(lease.fetches),
            sorted(lease.leave_at),
            len(lease.arrived),
        ),
        repr(lease.holds),
    )
