"""Make computed pages findable: go on at the lease's own node, merge per group and page, say which pages to remap.

tree    hole              -> takes the sequence's page
        a different page  -> the sequence is remapped to it, its own page is freed
        the same page     -> nothing
"""

from __future__ import annotations

from typing import NamedTuple

from cache_service.core.base.types import SpillPolicy, Stored
from cache_service.core.device.device_cache import DeviceCache
from cache_service.core.device.lease_table import Lease
from cache_service.core.device.page_pool import pack
from cache_service.core.device.radix_node import Node
from cache_service.core.device.sparse_pages import Rank
from cache_service.core.device.transfer_table import SparsePage
from session.messages import Remap
from session.words import HASH_BYTES, PAGE_ID_BYTES, GroupPages, PageHash


class Run(NamedTuple):
    """Page numbers first .. end - 1 of the path, which stand in `node`; `fresh`: this publish made them findable."""

    node: Node
    first: int
    end: int
    fresh: bool


def publish(cache: DeviceCache, lease: Lease, tokens: bytes, computed: int) -> Remap | None:
    """Take over the accepted tokens and the computed length; every page wholly below it becomes findable."""
    if tokens:
        cache.leases.accept(lease, tokens)
    lease.computed_tokens = computed
    remaps: list[GroupPages] = []
    end = computed // cache.layout.page_tokens
    if end > lease.published_pages and not lease.bypass:
        remaps = publish_pages(cache, lease, end)
    if cache.sparse:
        _publish_snapshots(cache, lease)
        _drop_restored(cache, lease)
        _slide_windows(cache, lease)
    return Remap(lease.sequence_id, tuple(remaps)) if remaps else None


def publish_pages(cache: DeviceCache, lease: Lease, end: int) -> list[GroupPages]:
    """Put the lease's pages up to page number `end` into the tree; returns what to remap."""
    remaps: list[GroupPages] = []
    runs: list[Run] | None = None
    if cache.sparse or cache.host is not None or cache.events.is_wanted:
        runs = []
    old = lease.node
    node = old if _grow(cache, lease, end, runs) else _descend(cache, lease, end, runs, remaps)
    if node is not old and not cache.tree.hand_down(old, node):
        cache.tree.pin(node)  # the deeper pin exists before the shallower one is dropped
        cache.unpin(old)
    lease.node, lease.published_pages = node, end
    if runs is not None:
        if cache.sparse:
            _fill_windows(cache, lease, runs, remaps)
        _tell(cache, lease, runs)
    return remaps


def _grow(cache: DeviceCache, lease: Lease, end: int, runs: list[Run] | None) -> bool:
    """A leaf whose only holder is this lease (and spills, which do not mind) grows in place.

    Its run is noted in `runs`, where somebody asks for them.
    """
    node, start = lease.node, lease.published_pages
    if node.children or node.pins != 1 + node.ticket_pins or node.parent is None or node.soft_until_ms:
        return False
    size, count = cache.layout.page_key_bytes, end - start
    cache.tree.grow(node, lease.tokens(start * size, end * size), _take_own(cache, lease, count), count)
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
            count = tree.take_ghosts(node, tokens, pos, limit)
            is_again = count > 0
            count = count or end - page
            node = tree.attach(
                node, bytearray(memoryview(tokens)[pos : pos + count * size]), _take_own(cache, lease, count), count
            )
            node.uses, node.priority = int(is_again), lease.priority
            tree.policy.stored(node)
        else:
            count = tree.common_pages(child, tokens, pos, limit)
            node = tree.split(child, count) if count < child.resident else child
            _remap_full(cache, lease, node, page, remaps)
        if runs is not None:
            runs.append(Run(node, page, page + count, child is None))
        page += count
        pos += count * size
    return node


def _take_own(cache: DeviceCache, lease: Lease, count: int) -> list[bytearray]:
    """The lease's next FULL pages, which it gives away; holes for the groups that are merged page by page."""
    num_bytes = count * PAGE_ID_BYTES
    pages = []
    for private in lease.private:
        pages.append(private[:num_bytes])
        del private[:num_bytes]
    for group in cache.layout.sparse:
        pages[group] = bytearray(num_bytes)
    return pages


def _remap_full(cache: DeviceCache, lease: Lease, node: Node, page: int, remaps: list[GroupPages]) -> None:
    """The lease's next FULL pages are those of the node; its own go free."""
    for group, pool in cache.full_pools:
        canonical, private = bytes(node.pages[group]), lease.private[group]
        own = private[: len(canonical)]
        del private[: len(canonical)]
        if own != canonical:
            pool.give(own)
            remaps.append(GroupPages(group, page, canonical))


def _drop_restored(cache: DeviceCache, lease: Lease) -> None:
    """The launch that restored the snapshots is reported."""
    if lease.computed_tokens > lease.resumed_pages * cache.layout.page_tokens:
        for held in lease.restore:
            cache.sparse[held.group].drop((held.slot,), Rank.WARM)
        lease.restore = ()


def _fill_windows(cache: DeviceCache, lease: Lease, runs: list[Run], remaps: list[GroupPages]) -> None:
    for group, hold in lease.windows.items():
        pages = cache.sparse[group]
        for run in runs:
            for page in range(max(run.first, hold.first), min(run.end, hold.end)):
                own = hold.page_ids[page - hold.first]
                standing = run.node.page_id(group, page)
                if not standing:
                    pages.publish(own, run.node, page)
                elif standing != own:
                    pages.read((standing,))
                    pages.drop((own,), Rank.WARM)
                    hold.page_ids[page - hold.first] = standing
                    remaps.append(GroupPages(group, page, pack([standing])))


def _publish_snapshots(cache: DeviceCache, lease: Lease) -> None:
    """Snapshots whose boundary a completed launch has passed."""
    waiting = []
    for leave in lease.leave:
        if leave.boundary > lease.published_pages or leave.boundary * cache.layout.page_tokens > lease.computed_tokens:
            waiting.append(leave)
        else:
            publish_slot(cache, lease.node, leave.group, leave.boundary, leave.slot)
    lease.leave = tuple(waiting)


def publish_slot(cache: DeviceCache, node: Node, group: int, boundary: int, slot: int) -> None:
    """Give a private slot to the tree; where there is a snapshot already, the slot is freed."""
    node = node.holder(boundary - 1)
    pages = cache.sparse[group]
    if not node.page_id(group, boundary - 1):
        pages.publish(slot, node, boundary - 1)
        if cache.host is not None and cache.config.spill is SpillPolicy.WRITE_THROUGH:
            cache.spill_queue[node] = None
    pages.drop((slot,), Rank.WARM)


def fill_hole(cache: DeviceCache, node: Node, target: SparsePage) -> None:
    """Give a page that a fetch brought to the tree, unless another stands there; its reader keeps it either way."""
    node = node.holder(target.page)
    if not node.page_id(target.group, target.page):
        cache.sparse[target.group].publish(target.page_id, node, target.page)


def publish_rolling(cache: DeviceCache, lease: Lease, boundary: int) -> None:
    """The snapshot of the page boundary that the worker names, if what lies before it is published."""
    if 0 < boundary <= lease.published_pages:
        for held in lease.rolling:
            publish_slot(cache, lease.node, held.group, boundary, held.slot)
        lease.rolling = ()


def _slide_windows(cache: DeviceCache, lease: Lease) -> None:
    """Drop the published pages that no later launch reads."""
    layout = cache.layout
    for group, hold in lease.windows.items():
        rule = layout.rules[group]
        first = min(rule.first_page(lease.computed_tokens), hold.end)
        if not lease.bypass:
            first = min(first, lease.published_pages)
        if first <= hold.first:
            continue
        run = rule.reach_pages()
        ends = lease.resume_boundaries(layout.page_tokens, lease.resumed_pages)
        dropped = hold.page_ids[: first - hold.first]
        warm = [any(end - run <= hold.first + at < end for end in ends) for at in range(len(dropped))]
        del hold.page_ids[: len(dropped)]
        hold.first = first
        pages = cache.sparse[group]
        pages.drop((page for page, keep in zip(dropped, warm, strict=True) if not keep), Rank.COLD)
        pages.drop((page for page, keep in zip(dropped, warm, strict=True) if keep), Rank.WARM)


# Events and spills.


def _tell(cache: DeviceCache, lease: Lease, runs: list[Run]) -> None:
    if cache.host is not None and cache.config.spill is SpillPolicy.WRITE_THROUGH:
        for run in runs:
            if run.node.spilled < run.node.resident:
                cache.spill_queue[run.node] = None
    if cache.events.is_wanted:
        cache.tree.ensure_hashes(lease.node)
        for run in runs:
            if run.fresh:
                _record_stored(cache, run)


def _record_stored(cache: DeviceCache, run: Run) -> None:
    node, size = run.node, cache.layout.page_key_bytes
    first, end = run.first - node.start, run.end - node.start
    packed = bytes(node.hashes[first * HASH_BYTES : end * HASH_BYTES])
    hashes = tuple(PageHash(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES))
    before = node.hashes[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else None
    parent = bytes(before if before is not None else node.parent.hashes[-HASH_BYTES:])  # type: ignore[union-attr]
    tokens = bytes(node.key[first * size : end * size])
    for group in cache.layout.full or (0,):
        cache.events.record(Stored(cache.worker_id, group, node.root.namespace, parent, hashes, tokens))
