"""Keeps host copies of what is in use: hits renew them; what a store lost is refilled, a little at each tick."""

from __future__ import annotations

from collections.abc import Iterator

from cache_service.core.base.types import SpillPolicy
from cache_service.core.device.radix_node import Node
from cache_service.core.device_cache import DeviceCache
from session.words import HASH_BYTES

# What one tick looks at, for each worker: about 2 ms.
PAGES_PER_TICK = 1_024
NODES_PER_TICK = 1_024

# A refill pauses while this many nodes wait for their spill.
MAX_WAITING = 256


def note_hit(cache: DeviceCache, node: Node) -> None:
    """A lease was granted this path; deeper nodes first, so that tails are renewed before heads."""
    if cache.host is None:
        return
    step, since_ms = node, cache.now_ms - cache.config.host_renew_ms
    while step.parent is not None:
        if step.renewed_ms <= since_ms:
            step.renewed_ms = cache.now_ms
            cache.renewals[step] = None
        step = step.parent


def start_refill(cache: DeviceCache) -> None:
    """The tier lost what it held, or is another one: every page may be spilled again."""
    cache.refill = _nodes(cache)


def tick(cache: DeviceCache) -> None:
    if cache.host is None or cache.host.index.breaker.is_open:
        return
    left = PAGES_PER_TICK
    while cache.renewals and left > 0:
        node, _ = cache.renewals.popitem(last=False)
        left -= node.resident
        _renew(cache, node)
    if cache.refill is not None:
        _refill(cache, cache.refill)


def _renew(cache: DeviceCache, node: Node) -> None:
    """Rows that are gone while their pages are used are written again."""
    assert cache.host is not None
    index, fingerprint = cache.host.index, cache.host.fingerprint
    cache.tree.ensure_hashes(node)
    hashes = [bytes(node.hashes[at : at + HASH_BYTES]) for at in range(0, len(node.hashes), HASH_BYTES)]
    index.touch(fingerprint, hashes)
    floor = index.floor(node.root.digest)
    for at, page_hash in enumerate(hashes[: node.spilled]):
        if not index.known(fingerprint, page_hash, floor):
            node.spilled = at
            _queue(cache, node)
            return


def _refill(cache: DeviceCache, nodes: Iterator[Node]) -> None:
    for _ in range(NODES_PER_TICK):
        if len(cache.spill_queue) >= MAX_WAITING:
            return
        node = next(nodes, None)
        if node is None:
            cache.refill = None
            return
        node.spilled = 0
        _queue(cache, node)


def _queue(cache: DeviceCache, node: Node) -> None:
    """write_back looks for the cold end itself."""
    spill = cache.config.spill
    if node.resident and (spill is SpillPolicy.WRITE_THROUGH or (spill is SpillPolicy.SELECTIVE and node.uses)):
        cache.spill_queue[node] = None


def _nodes(cache: DeviceCache) -> Iterator[Node]:
    """Every node, parents first, while the tree changes in between: of what was split since, both halves."""
    pending = [(child, child.start) for root in list(cache.tree.roots.values()) for child in root.children.values()]
    for node, start in pending:
        above = node.parent
        while above is not None and above.parent is not None and above.start >= start:
            yield above
            above = above.parent
        pending.extend((child, child.start) for child in node.children.values())
        yield node
