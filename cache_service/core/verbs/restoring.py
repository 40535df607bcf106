"""Puts a worker's inventory into the tree: pages that still hold their KV after the manager lost its state.

A run begins where its parent run ends, or at the start of a prompt. Pages of it that stand in the tree already stay as
they are, its others are taken from the free ones. A page of a group with holes that is not free any more is left out.
No lease holds them afterwards: they may be evicted, those that came first before those that came later.
"""

from __future__ import annotations

from typing import NamedTuple

from cache_service.core.device.radix_node import Node, Root
from cache_service.core.device.radix_tree import Walk
from cache_service.core.device_cache import DeviceCache
from cache_service.core.verbs import publishing
from cache_service.core.verbs.step_check import check_namespace, check_page_ids, check_tokens
from session.errors import InvalidInput, TooMany
from session.messages import CachedRun, RunRefusal
from session.words import PAGE_ID_BYTES, TOKEN_BYTES, Namespace, RefusalReason


class _Start(NamedTuple):
    """Where a run begins: behind `node`, which is a stand-in where the namespace has no root yet."""

    node: Node
    namespace: Namespace


def restore(cache: DeviceCache, run: CachedRun) -> RunRefusal | None:
    """Restores a run. Returns why not, without a change, where a page is somebody else's by now or its parent is gone.

    Raises InvalidInput, TooMany.
    """
    cache.restored.begin(run.run)
    start = _start(cache, run)
    if isinstance(start, str):
        return RunRefusal(run.run, RefusalReason.NO_ROOM, start)
    _check(cache, run, start)
    walk = cache.tree.walk(start.node, run.tokens, 0, len(run.tokens))
    for group in cache.groups:
        taken = group.cannot_restore(run.page_ids[group.number], walk.end - start.node.end)
        if taken is not None:
            return RunRefusal(run.run, RefusalReason.NO_ROOM, taken)
    _commit(cache, run, start, walk)
    return None


def _start(cache: DeviceCache, run: CachedRun) -> _Start | str:
    """Returns where the run begins, or why nowhere: its parent was evicted, or its namespace cleared."""
    if not run.parent_run:
        if run.namespace is None:
            raise InvalidInput("namespace", "must be set")
        check_namespace(cache, run.namespace)
        if cache.restored.is_cleared(run.namespace):
            return "the namespace was cleared"
        root = cache.tree.roots.get(run.namespace) or Root(run.namespace, len(cache.groups))
        return _Start(root, run.namespace)
    if not cache.restored.knows(run.parent_run):
        raise InvalidInput("parent_run", f"{run.parent_run} is not known")
    parent = cache.restored.find(run.parent_run)
    if parent is None:
        return "the run before it was evicted"
    namespace = parent.node.root.namespace
    # With `unused_only` the root stays, and so does a parent that is held.
    if cache.restored.is_cleared(namespace) or cache.tree.roots.get(namespace) is not parent.node.root:
        return "the namespace was cleared"
    node = parent.node.holder(parent.end - 1)
    if node.end > parent.end:
        node = cache.tree.split(node, parent.end - node.start)
    return _Start(node, namespace)


def _check(cache: DeviceCache, run: CachedRun, start: _Start) -> None:
    size, page_tokens = cache.layout.page_key_bytes, cache.layout.page_tokens
    check_tokens(run.tokens, "tokens", cache.config.max_sequence_tokens)
    if len(run.tokens) % size:
        raise InvalidInput("tokens", f"{len(run.tokens) // TOKEN_BYTES} are no whole pages of {page_tokens} tokens")
    num_pages = len(run.tokens) // size
    if (start.node.end + num_pages) * page_tokens > cache.config.max_sequence_tokens:
        raise TooMany("tokens", f"the path is longer than {cache.config.max_sequence_tokens} tokens")
    if len(run.page_ids) != len(cache.groups):
        raise InvalidInput("page_ids", f"has {len(run.page_ids)} groups, not {len(cache.groups)}")
    for group in cache.groups:
        _check_ids(run.page_ids[group.number], num_pages, group.spec.num_pages, f"page_ids[{group.number}]")


def _check_ids(packed: bytes, num_pages: int, pool_pages: int, where: str) -> None:
    if len(packed) != num_pages * PAGE_ID_BYTES:
        raise InvalidInput(where, f"has {len(packed)} bytes for {num_pages} pages")
    check_page_ids(packed, pool_pages, where)


# The commit: cannot fail.


def _commit(cache: DeviceCache, run: CachedRun, start: _Start, walk: Walk) -> None:
    tree, size = cache.tree, cache.layout.page_key_bytes
    first, end = start.node.end, start.node.end + len(run.tokens) // size
    node, fresh = tree.node_at(walk), end - walk.end
    if node.parent is None:
        node = tree.root(start.namespace)
    tree.pin(node)
    if fresh:
        node = _attach(cache, run, node, fresh)
    for sparse in cache.sparse:
        sparse.fill(node, first, run.page_ids[sparse.number])
    if cache.host is not None or cache.events.is_wanted:
        publishing.tell(cache, node, [publishing.Run(node, end - fresh, end, fresh > 0)])
    cache.restored.add(run.run, node, end)
    cache.counters.restored += fresh
    cache.unpin(node)


def _attach(cache: DeviceCache, run: CachedRun, parent: Node, count: int) -> Node:
    """Returns a new node of the run's last `count` pages, pinned in place of its parent."""
    tree = cache.tree
    pages = []
    for group in cache.groups:
        pages.append(group.restored(run.page_ids[group.number][-count * PAGE_ID_BYTES :]))
    leaf = tree.attach(parent, run.tokens[-count * cache.layout.page_key_bytes :], pages, count)
    cache.policy.stored(leaf)
    if not tree.hand_down(parent, leaf):
        tree.pin(leaf)
        cache.unpin(parent)
    return leaf
