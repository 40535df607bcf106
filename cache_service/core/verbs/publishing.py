"""Makes computed pages findable: goes on at the lease's own node, merges by group and page, says which to remap.

tree    hole              -> takes the sequence's page
        a different page  -> the sequence is remapped to it, its own page is freed
        the same page     -> nothing
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cache_service.core.base.types import SpillPolicy, Stored
from cache_service.core.device.lease_table import Lease
from cache_service.core.device.radix_node import Node
from cache_service.core.device_cache import DeviceCache
from session.messages import Remap
from session.words import HASH_BYTES, GroupPages, PageHash


class Run(NamedTuple):
    """Page numbers first .. end - 1 of the path, which stand in `node`; `fresh`: this publish made them findable."""

    node: Node
    first: int
    end: int
    fresh: bool


def publish(cache: DeviceCache, lease: Lease, tokens: bytes, computed: int) -> Remap | None:
    """Takes over the accepted tokens and the computed length; every page wholly below it becomes findable."""
    if tokens:
        cache.leases.accept(lease, tokens)
    lease.computed_tokens = computed
    remaps: list[GroupPages] = []
    end = computed // cache.layout.page_tokens
    if end > lease.published_pages and not lease.bypass:
        remaps = publish_pages(cache, lease, end)
    for group in cache.sparse:
        queue_spills(cache, group.publish(lease))
    return Remap(lease.sequence_id, tuple(remaps)) if remaps else None


def publish_pages(cache: DeviceCache, lease: Lease, end: int) -> list[GroupPages]:
    """Puts the lease's pages up to page number `end` into the tree; returns what to remap."""
    remaps: list[GroupPages] = []
    runs: list[Run] | None = None
    if cache.host is not None or cache.events.is_wanted:
        runs = []
    old = lease.node
    node = old if _grow(cache, lease, end, runs, remaps) else _descend(cache, lease, end, runs, remaps)
    if node is not old and not cache.tree.hand_down(old, node):
        cache.tree.pin(node)  # the deeper pin exists before the shallower one is dropped
        cache.unpin(old)
    lease.node, lease.published_pages = node, end
    if runs is not None:
        tell(cache, lease.node, runs)
    return remaps


def _grow(cache: DeviceCache, lease: Lease, end: int, runs: list[Run] | None, remaps: list[GroupPages]) -> bool:
    """Grows a leaf in place where this lease is its only holder, but for spills.

    Appends the run to `runs`, if there is a list.
    """
    node, start = lease.node, lease.published_pages
    if node.children or node.pins != 1 + node.ticket_pins or node.parent is None or node.soft_until_ms:
        return False
    size, count = cache.layout.page_key_bytes, end - start
    pages = []
    for group in cache.groups:
        pages.append(group.give_to_node(lease, count))
    cache.tree.grow(node, lease.tokens(start * size, end * size), pages, count)
    for sparse in cache.sparse:
        sparse.merge(lease, node, start, end, remaps)
    if runs is not None:
        runs.append(Run(node, start, end, True))
    return True


def _descend(cache: DeviceCache, lease: Lease, end: int, runs: list[Run] | None, remaps: list[GroupPages]) -> Node:
    """Returns the node that ends at page number `end`."""
    tree, size = cache.tree, cache.layout.page_key_bytes
    node, page = lease.node, lease.published_pages
    tokens, pos = lease.prompt, page * size
    if end * size > len(tokens):
        tokens, pos = lease.tokens(page * size, end * size), 0
    limit = pos + (end - page) * size
    while page < end:
        child = node.children.get(tokens[pos : pos + size])
        if child is None:
            # What was evicted comes back as the run that it was: policies take that as a use.
            count = tree.run_marks.take(node, tokens, pos, limit)
            is_again = count > 0
            count = count or end - page
            pages = []
            for group in cache.groups:
                pages.append(group.give_to_node(lease, count))
            node = tree.attach(node, bytearray(memoryview(tokens)[pos : pos + count * size]), pages, count)
            node.uses, node.priority = int(is_again), lease.priority
            tree.policy.stored(node)
        else:
            count = tree.common_pages(child, tokens, pos, limit)
            node = tree.split(child, count) if count < child.resident else child
        for group in cache.sparse if child is None else cache.groups:
            group.merge(lease, node, page, page + count, remaps)
        if runs is not None:
            runs.append(Run(node, page, page + count, child is None))
        page += count
        pos += count * size
    return node


# Events and spills.


def queue_spills(cache: DeviceCache, nodes: Iterable[Node]) -> None:
    """Queues nodes that hold more pages now for spills; only write_through spills for that reason."""
    if cache.host is not None and cache.config.spill is SpillPolicy.WRITE_THROUGH:
        for node in nodes:
            if node.spilled < node.resident:
                cache.spill_queue[node] = None


def tell(cache: DeviceCache, node: Node, runs: list[Run]) -> None:
    """Records events of what became findable on the path down to `node`."""
    queue_spills(cache, [run.node for run in runs])
    if cache.events.is_wanted:
        cache.tree.ensure_hashes(node)
        for run in runs:
            for event in stored_events(cache, run.node, run.first, run.end) if run.fresh else ():
                cache.events.record(event)


def stored_events(cache: DeviceCache, node: Node, start: int, stop: int) -> list[Stored]:
    """Returns an event for each group of a node's pages start .. stop - 1, whose hashes must be known."""
    size = cache.layout.page_key_bytes
    first, end = start - node.start, stop - node.start
    packed = bytes(node.hashes[first * HASH_BYTES : end * HASH_BYTES])
    hashes = tuple(PageHash(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES))
    before = node.hashes[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else None
    parent = bytes(before if before is not None else node.parent.hashes[-HASH_BYTES:])  # type: ignore[union-attr]
    tokens = bytes(node.key[first * size : end * size])
    namespace = node.root.namespace
    return [Stored(cache.worker_id, number, namespace, parent, hashes, tokens) for number in cache.event_groups]
