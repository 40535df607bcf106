"""One worker's pools, tree, policy, leases and tickets: the only place where they are paired.

Knows no plan, no other worker, no stream and no clock; the verbs that work on it stand above.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from cache_service.core.eviction import make_policy
from cache_service.core.hash_index import HostView
from cache_service.core.layout import make_layout
from cache_service.core.lease_table import LeaseTable
from cache_service.core.manager_config import ManagerConfig
from cache_service.core.page_pool import PagePool
from cache_service.core.radix_node import Node
from cache_service.core.radix_tree import RadixTree
from cache_service.core.sparse_pages import SparsePages
from cache_service.core.transfer_table import TicketIds, TransferTable
from cache_service.core.types import (
    HASH_BYTES,
    PAGE_ID_BYTES,
    Event,
    Hello,
    MissReason,
    PageHash,
    Rates,
    Removed,
    SpillPolicy,
)


class Counters:
    """What one worker's cache did so far; admitted requests only."""

    __slots__ = ("cached", "computed", "evicted", "fetched", "misses", "prompt", "refusals", "requests")

    def __init__(self) -> None:
        self.requests = self.prompt = self.cached = self.fetched = self.computed = 0
        self.refusals = self.evicted = 0
        self.misses: dict[MissReason, int] = {}


class DeviceCache:
    """Everything that the manager knows about one incarnation's pages."""

    def __init__(
        self,
        hello: Hello,
        config: ManagerConfig,
        host: HostView | None,
        ids: TicketIds,
        record: Callable[[Event], None] | None = None,
    ) -> None:
        self.worker_id, self.config, self.host, self.record = hello.worker_id, config, host, record
        self.layout = layout = make_layout(hello.groups, hello.page_tokens)
        self.pools = {group: PagePool(layout.specs[group].num_pages) for group in layout.full}
        self.sparse = {group: SparsePages(group, layout.specs[group]) for group in layout.sparse}
        size = min((pool.num_pages for pool in self.pools.values()), default=0)
        size = size or max((spec.num_pages for spec in layout.specs), default=0)
        self.policy = make_policy(config.policy, size)
        self.tree = RadixTree(layout.page_tokens, len(layout.specs), self.policy, config.ghost_factor * size)
        self.leases = LeaseTable()
        self.transfers = TransferTable(ids)
        self.rates = Rates()
        self.counters = Counters()
        self.keeps_hashes = host is not None or record is not None
        self.marks_uses = self.policy.counts_uses or (host is not None and config.spill is SpillPolicy.SELECTIVE)
        self.spill_queue: OrderedDict[Node, None] = OrderedDict()
        self.soft_nodes: dict[Node, None] = {}

    def unpin(self, node: Node) -> None:
        self.tree.unpin(node)
        if not self.layout.full:
            self.trim(node)

    # Eviction.

    def make_room(self, count: int) -> None:
        """Evict until every FULL group has `count` free pages."""
        for pool in self.pools.values():
            lacking = count - pool.num_free
            if lacking > 0:
                self.evict(lacking)

    def evict(self, count: int) -> None:
        """Cut exactly `count` pages off the tails of the policy's victims."""
        self.counters.evicted += count
        victim = self.policy.victim
        while count > 0:
            node = victim()
            taken = count if count < node.resident else node.resident
            self.cut(node, taken)
            count -= taken

    def cut(self, node: Node, count: int) -> int:
        """Free the last pages of an unpinned leaf, and the WINDOW and STATE pages at and behind them."""
        if self.record is not None:
            self._record_removed(node, count)
        removed = self.tree.cut(node, count)
        for group, pool in self.pools.items():
            pool.give(removed[group])
        freed = count * len(self.pools)
        if self.sparse:
            freed += sum(pages.discard(removed[group]) for group, pages in self.sparse.items())
        return freed

    def _record_removed(self, node: Node, count: int) -> None:
        assert self.record is not None
        self.tree.ensure_hashes(node)
        packed = bytes(node.hashes[(node.resident - count) * HASH_BYTES :])
        hashes = tuple(PageHash(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES))
        for group in self.layout.full or (0,):
            self.record(Removed(self.worker_id, group, hashes))

    # Without a FULL group nothing else shortens a path: places that hold no page any more are trimmed.

    def trim_all(self) -> None:
        if self.layout.full:
            for pages in self.sparse.values():
                pages.emptied.clear()
            return
        for pages in self.sparse.values():
            while pages.emptied:
                self.trim(pages.emptied.pop())

    def trim(self, node: Node) -> None:
        """Cut the empty tail of an unpinned leaf, then look at its parent."""
        step: Node | None = node if not self.layout.full else None
        while step is not None and step.parent is not None and not step.pins and not step.live_children:
            if step.resident:
                held = max(len(bytes(step.pages[group]).rstrip(b"\0")) for group in self.layout.sparse)
                keep = -(-held // PAGE_ID_BYTES)
                if keep < step.resident:
                    self.cut(step, step.resident - keep)
                if keep:
                    return
            step = step.parent
