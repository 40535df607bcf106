"""Keeps host copies of what is in use: hits renew them, and what a store lost is written again, some at each tick.

Rows of a path are kept in order: the quota drops those used longest ago, so heads are to be younger than tails.
"""

from __future__ import annotations

from collections.abc import Iterator

from cache_service.core.base.types import SpillPolicy
from cache_service.core.device.radix_node import Node
from cache_service.core.device_cache import DeviceCache
from session.words import HASH_BYTES

# What one tick looks at, for each worker: about 2 ms.
PAGES_PER_TICK = 1_024
NODES_PER_TICK = 1_024

# A node's rows are touched in the store again when more of them come so soon after its first ones: a long prompt is
# spilled in several orders. Later, as when a conversation goes on, that would be a command for each page before it.
FRESH_MS = 60_000

# A refill pauses while this many nodes wait for their spill.
REFILL_PAUSES_AT = 256


def note_hit(cache: DeviceCache, node: Node) -> None:
    """Queues what was not renewed for long on the path of a granted lease, and all nodes before that."""
    if cache.host is None:
        return
    step, since_ms, is_behind = node, cache.now_ms - cache.config.host_renew_ms, False
    while step.parent is not None:
        if step.renewed_ms <= since_ms:
            step.renewed_ms = cache.now_ms
            cache.renewals[step] = is_behind = True
        elif is_behind:
            cache.renewals.setdefault(step, False)
        step = step.parent


def note_spilled(cache: DeviceCache, node: Node, first_page: int) -> None:
    """Queues the path before newly added rows, from `first_page` on: those before are to be younger."""
    # Orders are acknowledged in any order.
    if first_page == node.start or not node.renewed_ms:
        node.renewed_ms = cache.now_ms
    if first_page > node.start:
        cache.renewals[node] = cache.renewals.get(node, False) or cache.now_ms - node.renewed_ms < FRESH_MS
    step = node.parent
    while first_page and step is not None and step.parent is not None:
        cache.renewals.setdefault(step, False)
        step = step.parent


def start_refill(cache: DeviceCache) -> None:
    """Has every page spilled again: the tier lost what it held, or is another one."""
    cache.refill = _nodes(cache)


def tick(cache: DeviceCache) -> None:
    if cache.host is None or cache.host.index.breaker.is_open:
        return
    left = PAGES_PER_TICK
    while left > 0 and (cache.renewing or _begin_round(cache)):
        node, in_store = cache.renewing.popitem(last=False)
        left -= node.resident
        _renew(cache, node, in_store)
    if cache.refill is not None:
        _refill(cache, cache.refill)


def _begin_round(cache: DeviceCache) -> bool:
    """Takes all that waits as one round, deeper nodes first: what many prompts share would otherwise come again and
    again."""
    for node in sorted(cache.renewals, key=_start, reverse=True):
        cache.renewing[node] = cache.renewals.pop(node)
    return bool(cache.renewing)


def _start(node: Node) -> int:
    return node.start


def _renew(cache: DeviceCache, node: Node, in_store: bool) -> None:
    """Renews a node's rows; those that are gone while their pages are used are written again."""
    assert cache.host is not None
    index, fingerprint = cache.host.index, cache.host.fingerprint
    cache.tree.ensure_hashes(node)
    hashes = [bytes(node.hashes[at : at + HASH_BYTES]) for at in range(0, len(node.hashes), HASH_BYTES)]
    index.touch(fingerprint, hashes, in_store=in_store)
    if not in_store:
        return
    floor = index.cleared.floor(node.root.digest)
    for at, page_hash in enumerate(hashes[: node.spilled]):
        if not index.known(fingerprint, page_hash, floor):
            node.spilled = at
            _queue(cache, node)
            return


def _refill(cache: DeviceCache, nodes: Iterator[Node]) -> None:
    for _ in range(NODES_PER_TICK):
        if len(cache.spill_queue) >= REFILL_PAUSES_AT:
            return
        node = next(nodes, None)
        if node is None:
            cache.refill = None
            return
        node.spilled = 0
        _queue(cache, node)


def is_wanted(cache: DeviceCache, node: Node) -> bool:
    """Returns whether the tier is to have the node's pages; write_back looks for the cold end itself."""
    spill = cache.config.spill
    return spill is SpillPolicy.WRITE_THROUGH or (spill is SpillPolicy.SELECTIVE and node.uses > 0)


def _queue(cache: DeviceCache, node: Node) -> None:
    if node.resident and is_wanted(cache, node):
        cache.spill_queue[node] = None


def _nodes(cache: DeviceCache) -> Iterator[Node]:
    """Yields every node, parents first, while the tree changes in between: of what was split since, both halves."""
    pending = [(child, child.start) for root in list(cache.tree.roots.values()) for child in root.children.values()]
    for node, start in pending:
        above = node.parent
        while above is not None and above.parent is not None and above.start >= start:
            yield above
            above = above.parent
        pending.extend((child, child.start) for child in node.children.values())
        yield node
