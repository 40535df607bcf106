"""Soft pins and ticks of one worker's cache."""

from __future__ import annotations

from cache_service.core.base.types import SpillPolicy
from cache_service.core.device.page_pool import unpack
from cache_service.core.device.radix_node import Node
from cache_service.core.device.radix_tree import Walk
from cache_service.core.device.sparse_pages import Retention
from cache_service.core.device_cache import DeviceCache
from cache_service.core.verbs import fetching, renewal, spilling
from session.words import Namespace


def lacks_pin_room(cache: DeviceCache, namespace: Namespace, tokens: bytes) -> str | None:
    """Returns why the cached prefix may not be pinned; None when it may."""
    found = _cached(cache, namespace, tokens)
    if found is None:
        return None
    pinned = sum(node.resident for node in cache.tree.path(found.node) if node.soft_until_ms)
    num_pages = cache.soft_pins.num_pages + found.end - pinned
    most = int(cache.num_pages * cache.config.max_pinned_share)
    if num_pages <= most:
        return None
    return f"{num_pages} pages of {cache.worker_id} would be pinned; at most {most} may be"


def pin_softly(cache: DeviceCache, namespace: Namespace, tokens: bytes, until_ms: int) -> int:
    """Puts the cached prefix last in the eviction order until then (0: as usual again). Returns its tokens."""
    found = _cached(cache, namespace, tokens)
    if found is None:
        return 0
    node = cache.tree.node_at(found)
    for step in cache.tree.path(node):
        _mark(cache, step, until_ms)
    return node.end * cache.layout.page_tokens


def _cached(cache: DeviceCache, namespace: Namespace, tokens: bytes) -> Walk | None:
    root = cache.tree.roots.get(namespace)
    size = cache.layout.page_key_bytes
    return cache.tree.walk(root, tokens, 0, len(tokens) // size * size) if root is not None else None


def _mark(cache: DeviceCache, node: Node, until_ms: int) -> None:
    """Sets or ends a node's pin. A queued node enters the order that it now belongs to, as just used."""
    queued = node.queue is not None
    if queued:
        cache.policy.remove(node)
    if until_ms:
        cache.soft_pins.set(node, until_ms)
    else:
        cache.soft_pins.drop(node)
    if queued:
        cache.policy.add(node)
    for group in cache.sparse:
        group.pages.move(unpack(node.pages[group.number]), Retention.SOFT if until_ms else Retention.WARM)


def tick(cache: DeviceCache, now_ms: int) -> None:
    cache.now_ms = now_ms
    ghosts = cache.tree.ghosts
    cache.unit_times.seen(ghosts.unit, ghosts.cut_pages, now_ms)
    for node in cache.soft_pins.due(now_ms):
        _mark(cache, node, 0)
    cache.spill_breaker.tick(now_ms)
    cache.fetch_breaker.tick(now_ms)
    spilling.abandon_overdue(cache, now_ms)
    fetching.note_late(cache, now_ms)
    renewal.tick(cache)
    if cache.config.spill is SpillPolicy.WRITE_BACK:
        spilling.queue_cold_end(cache)


def has_holders(cache: DeviceCache, namespace: Namespace | None) -> bool:
    """Returns whether a lease or an open spill holds pages of the namespace (None: of any)."""
    spilled = (spill.node.root.namespace for spill in cache.transfers.spills.values())
    return cache.leases.in_scope(namespace) or any(namespace in (None, name) for name in spilled)
