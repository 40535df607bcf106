"""Clear, in slices: each `yield` lets other calls and steps in.

Without `unused_only` nothing old may be found once the first slice has run, though steps go on between the slices: the
namespaces' trees are detached at once, and what they hold is freed slice by slice. Evictions may take some first.
With it, what is held when its slice comes stays.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

from cache_service.core.base.page_hash import namespace_digest
from cache_service.core.base.stats import ClearResult
from cache_service.core.device.page_pool import unpack
from cache_service.core.device.radix_node import Node, Root
from cache_service.core.device_cache import DeviceCache
from cache_service.core.host.hash_index import HashIndex
from session.words import Namespace

# Nodes or rows between two yields: about 1 ms.
SLICE = 500

Slices = Generator[None, None, ClearResult]


class _Pace:
    """Counts nodes, namespaces and rows over the whole call; says when it is time for a yield."""

    def __init__(self) -> None:
        self._count = 0

    def is_due(self) -> bool:
        self._count += 1
        return self._count % SLICE == 0


def clear(
    caches: Iterable[DeviceCache], tiers: Iterable[HashIndex], namespace: Namespace | None, *, detach: bool
) -> Slices:
    """Drops a namespace, or all (None)."""
    pace = _Pace()
    roots = [(cache, root) for cache in caches for root in cache.tree.roots_of(namespace)]
    digest = namespace_digest(namespace) if namespace is not None else None
    floors = [(index, index.hide(digest)) for index in tiers]
    if detach:
        for cache, root in roots:
            cache.tree.detach(root, told=namespace is None)
    num_pages = num_pinned = num_rows = num_hidden = 0
    for cache, root in roots:
        nodes = yield from _below(root, pace)
        for node in reversed(nodes):  # children before their parents
            pages, pinned = _drop(cache, node)
            num_pages, num_pinned = num_pages + pages, num_pinned + pinned
            if pace.is_due():
                yield
        cache.tree.forget_detached(root)
    for index, floor in floors:
        for key in index.all_keys() if namespace is not None else index.hidden_first(floor):
            num_rows += index.drop_hidden(key, namespace, floor)
            num_hidden += index.is_unknown(key)
            if pace.is_due():
                yield
    return ClearResult(num_pages, num_rows, num_pinned, num_hidden)


def count(caches: Iterable[DeviceCache], tiers: Iterable[HashIndex], namespace: Namespace | None) -> Slices:
    """Returns what `clear` would drop; changes nothing."""
    pace = _Pace()
    num_pages = num_pinned = num_rows = 0
    for cache in caches:
        for root in cache.tree.roots_of(namespace):
            for node in (yield from _below(root, pace)):
                pages = _droppable(cache, node)
                num_pages += pages
                num_pinned += pages if node.soft_until_ms else 0
                if pace.is_due():
                    yield
    for index in tiers:
        for key in index.all_keys():
            row = index.rows.get(key)
            num_rows += row is not None and (namespace is None or row.namespace == namespace)
            if pace.is_due():
                yield
    return ClearResult(num_pages, num_rows, num_pinned)


def _below(root: Root, pace: _Pace) -> Generator[None, None, list[Node]]:
    """Yields every node, parents first."""
    nodes: list[Node] = list(root.children.values())
    for node in nodes:
        nodes.extend(node.children.values())
        if pace.is_due():
            yield
    return nodes


def _droppable(cache: DeviceCache, node: Node) -> int:
    """Returns how many pages of the node are not held, all groups together."""
    num_full = 0 if node.pins else node.resident * len(cache.pools)
    return num_full + sum(
        group.pages.is_unread(page_id)
        for group in cache.sparse
        for page_id in unpack(node.pages[group.number])
        if page_id
    )


def _drop(cache: DeviceCache, node: Node) -> tuple[int, int]:
    """Returns how many pages were freed, and how many of them were under a Pin call."""
    was_pinned = bool(node.soft_until_ms)
    freed = 0
    if node.pins:
        freed = _drop_sparse(cache, node)
    elif node.resident and not node.children:
        freed = cache.cut(node, node.resident, is_cleared=True)
    return freed, freed if was_pinned else 0


def _drop_sparse(cache: DeviceCache, node: Node) -> int:
    freed = 0
    for group in cache.sparse:
        for page_id in unpack(node.pages[group.number]):
            if page_id and group.pages.is_unread(page_id):
                group.pages.evict_one(page_id)
                freed += 1
    return freed
