"""What is cached now, as the events that would have told of it; in slices, between which Steps are applied.

A watcher that applies these events and those recorded in between, in their order, has the state at the end: a slice
lists what is cached when it is made, later removals come as events, and so do additions, some of them a second time.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

from cache_service.core.base.types import Connection, Event
from cache_service.core.device.radix_node import Node, Root
from cache_service.core.device_cache import DeviceCache
from cache_service.core.verbs.publishing import stored_events
from cache_service.core.worker import Worker
from session.words import WorkerId

# Pages of one event: about 100 KB with their tokens.
MAX_PAGES = 1024

Slices = Generator[tuple[Event, ...], None, int]


def present_state(workers: Mapping[WorkerId, Worker]) -> Slices:
    """Yields the events, worker by worker, of each at first whether it is connected. Returns the pages told."""
    num_pages = 0
    for worker in list(workers.values()):
        if not _is_known(workers, worker):
            continue
        yield (connection(worker),)
        for root in list(worker.cache.tree.roots.values()):
            num_pages += yield from _below(workers, worker, root)
    return num_pages


def connection(worker: Worker) -> Connection:
    hello = worker.hello
    return Connection(hello.worker_id, hello.endpoint, worker.connected)


def _below(workers: Mapping[WorkerId, Worker], worker: Worker, root: Root) -> Slices:
    """Yields the events of a namespace's nodes. A node waits with the page number from which it is to be told, since
    its head may be split off meanwhile."""
    cache, num_pages = worker.cache, 0
    if cache.tree.roots.get(root.namespace) is not root:
        return 0
    pending: list[tuple[Node, int]] = [(child, 0) for child in root.children.values()]
    while pending and _is_known(workers, worker):
        node, first = pending.pop()
        if not _stands(cache, node):
            continue
        while first < node.end:
            cache.tree.ensure_hashes(node)
            holder = node.holder(first)
            end = min(holder.end, first + MAX_PAGES)
            yield tuple(stored_events(cache, holder, first, end))
            num_pages += end - first
            first = end
            if not _is_known(workers, worker) or not _stands(cache, node):
                break
        else:
            pending += [(child, node.end) for child in node.children.values()]
    return num_pages


def _is_known(workers: Mapping[WorkerId, Worker], worker: Worker) -> bool:
    return workers.get(worker.hello.worker_id) is worker


def _stands(cache: DeviceCache, node: Node) -> bool:
    """Returns whether the node is still in the tree and its namespace was not cleared."""
    root, parent = node.root, node.parent
    if not node.resident or parent is None or cache.tree.roots.get(root.namespace) is not root:
        return False
    return parent.children.get(bytes(node.key[: cache.layout.page_key_bytes])) is node
