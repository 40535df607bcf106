"""One worker's pools, tree, policy, leases and tickets, and the acts that change several of them at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from cache_service.core.base.manager_config import ManagerConfig
from cache_service.core.base.types import Removed, SpillPolicy
from cache_service.core.device.event_log import EventLog
from cache_service.core.device.eviction_order import make_policy
from cache_service.core.device.ghost_table import GhostTable
from cache_service.core.device.kept_prompts import KeptPrompts
from cache_service.core.device.lease_table import LeaseTable, TokenBytes
from cache_service.core.device.radix_node import Node
from cache_service.core.device.radix_tree import RadixTree
from cache_service.core.device.restored_runs import RestoredRuns
from cache_service.core.device.transfer_table import TicketIds, TransferTable
from cache_service.core.device.unit_times import UnitTimes
from cache_service.core.host.breaker import Breaker
from cache_service.core.host.hash_index import HostView
from cache_service.core.kinds.layout import make_groups, make_layout
from cache_service.core.kinds.sparse_group import SparseGroup
from session.messages import Hello, Rates
from session.words import HASH_BYTES, PAGE_ID_BYTES, MissReason, PageHash


class Counters:
    """What one worker's cache did so far; admitted requests only."""

    __slots__ = ("cached", "declined", "evicted", "fetched", "matched", "misses", "prompt", "refusals", "restored")

    def __init__(self) -> None:
        self.prompt = self.matched = self.cached = self.fetched = self.refusals = self.evicted = 0
        self.declined = 0  # of these tokens the host tier had pages that were not fetched
        self.restored = 0  # pages of a group without holes that the worker's inventory brought
        self.misses: dict[MissReason, int] = {}

    @property
    def requests(self) -> int:
        """Each has one miss reason."""
        return sum(self.misses.values())

    @property
    def computed(self) -> int:
        return self.prompt - self.cached - self.fetched


class DeviceCache:
    """Everything that the manager knows about one incarnation's pages."""

    def __init__(
        self,
        hello: Hello,
        config: ManagerConfig,
        host: HostView | None,
        ids: TicketIds,
        lease_bytes: TokenBytes,
        events: EventLog,
        now_ms: int,
    ) -> None:
        self.model = hello.model
        self.worker_id, self.config, self.events = hello.worker_id, config, events
        self.layout = layout = make_layout(hello.groups, hello.page_tokens)
        whole = [spec.num_pages for number, spec in enumerate(layout.specs) if layout.full_mask >> number & 1]
        size = self.num_pages = min(whole) if whole else max(spec.num_pages for spec in layout.specs)
        self.policy = make_policy(config.policy, size)
        self.groups = make_groups(layout, self.policy)
        # Pages of groups without holes go with their nodes, all at once; those of the others one by one.
        self.sparse = tuple(group for group in self.groups if isinstance(group, SparseGroup))
        self.pools = {group.number: group.pool for group in self.groups if group not in self.sparse}
        self.full_pools = tuple(self.pools.items())
        self.event_groups = tuple(self.pools) or (0,)
        ghosts = GhostTable(config.ghost_factor * size, size)
        self.tree = RadixTree(layout.page_tokens, len(layout.specs), self.policy, ghosts)
        self.tree.now_ms = now_ms
        self.unit_times = UnitTimes(now_ms)  # for Explain: when what is gone went
        self.leases = LeaseTable(lease_bytes)
        self.kept = KeptPrompts(config.max_kept_bytes)
        self.transfers = TransferTable(ids)
        self.restored = RestoredRuns(sum(spec.num_pages for spec in layout.specs))
        self.rates = Rates()
        self.counters = Counters()
        self.spill_queue: OrderedDict[Node, None] = OrderedDict()
        self.spill_breaker = Breaker(config.breaker_failures, config.breaker_ms)
        self.soft_pins = self.tree.soft_pins
        # Whose host copies are to be the youngest, and whether in the store, too: those that wait, those of this round.
        self.renewals: dict[Node, bool] = {}
        self.renewing: OrderedDict[Node, bool] = OrderedDict()
        self.refill: Iterator[Node] | None = None  # what is still to be spilled to a store that lost everything
        self.fetch_breaker = Breaker(config.breaker_failures, config.breaker_ms)
        self.host = host
        self.set_host(host)

    @property
    def now_ms(self) -> int:
        """Time of the last step or tick."""
        return self.tree.now_ms

    @now_ms.setter
    def now_ms(self, now_ms: int) -> None:
        self.tree.now_ms = now_ms

    def set_host(self, host: HostView | None) -> None:
        """The host tier may come, go or change with each Hello."""
        if host is None or self.host is None or host.index is not self.host.index:
            self.fetch_breaker = Breaker(self.config.breaker_failures, self.config.breaker_ms)
        self.host = host
        selective = host is not None and self.config.spill is SpillPolicy.SELECTIVE
        self.marks_uses = selective or self.policy.counts_uses

    def unpin(self, node: Node) -> None:
        self.tree.unpin(node)
        if not self.full_pools:
            self.trim(node)

    # Eviction.

    def make_room(self, count: int) -> None:
        """Evicts as many pages as are missing for every FULL group to have `count` free ones."""
        for _, pool in self.full_pools:
            if pool.num_free < count:
                self.evict(count - pool.num_free)

    def evict(self, count: int) -> None:
        """Cuts exactly `count` pages off the tails of the policy's victims."""
        self.counters.evicted += count
        victim = self.policy.victim
        while count > 0:
            node = victim()
            num_pages = node.resident
            if num_pages > count:
                num_pages = count
            self.cut(node, num_pages)
            count -= num_pages

    def cut(self, node: Node, count: int, is_cleared: bool = False) -> int:
        """Free the last pages of an unpinned leaf, and the WINDOW and STATE pages at and behind them."""
        if self.events.is_wanted:
            self._record_removed(node, count)
        if node.soft_until_ms:
            self.soft_pins.shrunk(node, count)
        if (self.spill_queue or self.renewals or self.renewing) and count == node.resident:
            self.spill_queue.pop(node, None)
            self.renewals.pop(node, None)
            self.renewing.pop(node, None)
        removed = self.tree.cut(node, count, is_cleared)
        if len(self.restored):
            self.restored.was_cut(node)
        for group, pool in self.full_pools:
            pool.give(removed[group])
        freed = count * len(self.full_pools)
        if self.sparse:
            freed += sum(group.pages.discard(removed[group.number]) for group in self.sparse)
        return freed

    def _record_removed(self, node: Node, count: int) -> None:
        told = self.tree.detached.get(node.root)
        if told:
            return
        self.tree.ensure_hashes(node)
        first = node.resident - count
        if told is not None:
            first = max(first, min(self._published_again(node) - node.start, node.resident))
        packed = bytes(node.hashes[first * HASH_BYTES :])
        hashes = tuple(PageHash(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES))
        for number in self.event_groups if hashes else ():
            self.events.record(Removed(self.worker_id, number, hashes))

    def _published_again(self, node: Node) -> int:
        """Returns the pages of a detached path that are findable anew: watchers were told of them already."""
        root = self.tree.roots.get(node.root.namespace)
        if root is None:
            return 0
        tokens = b"".join(bytes(step.key) for step in self.tree.path(node))
        return self.tree.walk(root, tokens, 0, len(tokens)).end

    # Without a FULL group nothing else shortens a path: places that hold no page any more are trimmed.

    def trim_emptied(self, group: SparseGroup) -> None:
        emptied = group.pages.emptied
        if self.full_pools:
            emptied.clear()
        while emptied:
            self.trim(emptied.pop())

    def trim(self, node: Node) -> None:
        """Cuts the empty tail of an unpinned leaf, then looks at its parent."""
        step: Node | None = node if not self.full_pools else None
        while step is not None and step.parent is not None and not step.pins and not step.children:
            if step.resident:
                held = max(len(bytes(step.pages[group.number]).rstrip(b"\0")) for group in self.sparse)
                keep = -(-held // PAGE_ID_BYTES)
                if keep < step.resident:
                    self.cut(step, step.resident - keep)
                if keep:
                    return
            step = step.parent
