"""What people and time do to one worker's cache: soft pins, clearing, ticks. Knows no session."""

from __future__ import annotations

from cache_service.core import spilling
from cache_service.core.device_cache import DeviceCache
from cache_service.core.page_pool import unpack
from cache_service.core.radix_node import Node, Root
from cache_service.core.sparse_pages import Rank
from cache_service.core.types import Namespace, SpillPolicy


def pin_softly(cache: DeviceCache, namespace: Namespace, tokens: bytes, until_ms: int) -> int:
    """Rank the cached prefix last in eviction until then (0: as usual again); answers its tokens."""
    root = cache.tree.roots.get(namespace)
    if root is None:
        return 0
    size = cache.layout.page_bytes
    walk = cache.tree.walk(root, tokens, 0, len(tokens) // size * size)
    node = walk.node
    if walk.child is not None and walk.pages:
        whole = walk.pages * size == len(walk.child.key)
        node = walk.child if whole else cache.tree.split(walk.child, walk.pages)
    for step in cache.tree.path(node):
        _mark(cache, step, until_ms)
    return node.end * cache.layout.page_tokens


def _mark(cache: DeviceCache, node: Node, until_ms: int) -> None:
    """A queued node enters the order of its new rank, as just used."""
    queued = node.queue is not None
    if queued:
        cache.policy.remove(node)
    node.soft_until_ms = until_ms
    if queued:
        cache.policy.add(node)
    if until_ms:
        cache.soft_nodes[node] = None
    else:
        cache.soft_nodes.pop(node, None)
    for group, pages in cache.sparse.items():
        pages.rerank(unpack(node.pages[group]), Rank.SOFT if until_ms else Rank.WARM)


def tick(cache: DeviceCache, now_ms: int) -> None:
    for node in [node for node in cache.soft_nodes if node.soft_until_ms <= now_ms]:
        _expire(cache, node, now_ms)
    if cache.config.spill is SpillPolicy.WRITE_BACK:
        spilling.queue_cold_end(cache)


def _expire(cache: DeviceCache, node: Node, now_ms: int) -> None:
    """A split since the Pin call left its upper halves above: they expire with the node."""
    for step in cache.tree.path(node):
        if step.soft_until_ms and step.soft_until_ms <= now_ms:
            _mark(cache, step, 0)
    cache.soft_nodes.pop(node, None)


def has_holders(cache: DeviceCache, namespace: Namespace | None) -> bool:
    """Does a lease or an open spill hold pages of the namespace (None: of any)?"""
    spilled = (spill.node.root.namespace for spill in cache.transfers.spills.values())
    return cache.leases.in_scope(namespace) or any(namespace in (None, name) for name in spilled)


def drop_unused(cache: DeviceCache, namespace: Namespace | None) -> int:
    """Drop every page that nobody holds, and the ghosts; answers how many pages went free."""
    roots = [root for name, root in cache.tree.roots.items() if namespace in (None, name)]
    freed = 0
    for root in roots:
        for node in reversed(_below(root)):  # children before their parents
            if not node.pins:
                if node.resident:
                    freed += cache.cut(node, node.resident)
            else:
                freed += _drop_sparse(cache, node)
    for root in roots:
        _drop_ghosts(cache, root)
    return freed


def _below(root: Root) -> list[Node]:
    nodes: list[Node] = list(root.children.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def _drop_sparse(cache: DeviceCache, node: Node) -> int:
    freed = 0
    for group, pages in cache.sparse.items():
        for page_id in unpack(node.pages[group]):
            if page_id and pages.is_evictable(page_id):
                pages.evict_one(page_id)
                freed += 1
    return freed


def _drop_ghosts(cache: DeviceCache, root: Root) -> None:
    for node in reversed(_below(root)):
        if node in cache.tree.ghosts:
            cache.tree.forget(node)
