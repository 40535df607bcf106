"""One worker's pools, tree and policy: the only place where they are paired. Commits plans and evicts.

Knows no other worker, no stream and no clock. A commit pins the hits, then evicts, then takes; it cannot fail.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from cache_service.core import fetching, publishing
from cache_service.core.admission import Plan, lacks_for_extend, plan_acquire
from cache_service.core.eviction import make_policy
from cache_service.core.layout import make_layout
from cache_service.core.lease_table import HeldSlot, Lease, LeaseTable, LeaveSlot, WindowHold, full_end
from cache_service.core.manager_config import ManagerConfig
from cache_service.core.page_pool import PagePool, pack
from cache_service.core.radix_tree import Node, RadixTree
from cache_service.core.resume import holes, window_start
from cache_service.core.sparse_pages import Rank, SparsePages
from cache_service.core.survey import HostView
from cache_service.core.transfer_table import TicketIds, TransferTable
from cache_service.core.types import (
    HASH_BYTES,
    PAGE_ID_BYTES,
    Acquire,
    Event,
    Extend,
    ExtendGrant,
    Grant,
    GroupKind,
    GroupPages,
    Hello,
    MissReason,
    PageHash,
    PageId,
    Rates,
    Refusal,
    RefusalReason,
    ReleaseReason,
    Removed,
    SnapshotSlot,
    SpillPolicy,
    Transfer,
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

    # Acquire.

    def acquire(self, acquire: Acquire, may_fetch: bool = True) -> Grant | Refusal:
        plan = plan_acquire(self, acquire, may_fetch)
        if isinstance(plan, Refusal):
            self.counters.refusals += 1
            return plan
        return self.commit(plan, acquire, None)

    def commit(self, plan: Plan, acquire: Acquire, earlier: Lease | None) -> Grant:
        """Carry the plan out; `earlier` is the lease that waited for a fetch, if this is a new plan after its ack."""
        lease = self._take(plan, acquire)
        lease.device_tokens = plan.usable * self.layout.page_tokens
        if earlier is not None:
            lease.device_tokens, lease.fetched_any = earlier.device_tokens, earlier.fetched_any
        self.leases.add(lease)
        if plan.fetches:
            return self._grant(lease, plan, fetching.start(self, lease, plan))
        return self._admit(lease, plan)

    def _admit(self, lease: Lease, plan: Plan) -> Grant:
        """The sequence may run now: count it, and offer the snapshots of its first chunk."""
        leave: tuple[SnapshotSlot, ...] = ()
        if self.sparse:
            self._take_rolling(lease)
            lease.room = plan.boundary * self.layout.page_tokens
            chunk = lease.chunk_tokens or plan.num_tokens
            leave = self._offer_leave(lease, min(plan.num_tokens, lease.room + chunk))
        grant = self._grant(lease, plan, None, leave)
        counters = self.counters
        counters.requests += 1
        counters.prompt += plan.num_tokens
        counters.cached += grant.cached_tokens
        counters.fetched += grant.fetched_tokens
        counters.computed += plan.num_tokens - grant.usable_tokens
        reason = plan.match.miss_reason
        counters.misses[reason] = counters.misses.get(reason, 0) + 1
        return grant

    def _take(self, plan: Plan, acquire: Acquire) -> Lease:
        node, child, pages, _ = plan.place
        if child is not None and pages:
            node = self.tree.split(child, pages)
        elif node.parent is None:
            node = self.tree.root(acquire.namespace)
        self.tree.pin(node)
        if self.marks_uses or acquire.priority:
            self._mark_use(node, acquire.priority)
        for group, window in plan.windows.items():
            self.sparse[group].read(window.hits.values())
        restore = tuple(HeldSlot(group, slot) for group, slot in plan.snapshots.items() if slot)
        for held in restore:
            self.sparse[held.group].read((held.slot,))
        need = plan.total - plan.base
        self.make_room(need)
        private = [bytearray()] * len(self.layout.specs)
        for group in self.layout.full:
            private[group] = bytearray(self.pools[group].take(need))
        return Lease(
            sequence_id=acquire.sequence_id,
            namespace=acquire.namespace,
            prompt=acquire.tokens,
            node=node,
            published=plan.base,
            computed=plan.boundary * self.layout.page_tokens,
            priority=acquire.priority,
            chunk_tokens=acquire.chunk_tokens,
            resumed=plan.boundary,
            matched=plan.survey.matched,
            private=private,
            windows={group: self._take_window(group, plan) for group in self.layout.window},
            working=tuple(HeldSlot(group, self.sparse[group].take(1)[0]) for group in self.layout.state),
            restore=restore,
        )

    def _take_window(self, group: int, plan: Plan) -> WindowHold:
        window = plan.windows[group]
        fresh = iter(self.sparse[group].take(window.fresh))
        ids = [window.hits.get(page) or next(fresh) for page in range(window.first, window.end)]
        self._trim_all()
        return WindowHold(window.first, ids)

    def _mark_use(self, node: Node, priority: int) -> None:
        """Everything on the path was used again; pinned nodes stand in no order, so their rank may change."""
        selective = self.host is not None and self.config.spill is SpillPolicy.SELECTIVE
        step = node
        while step.parent is not None:
            step.uses += 1
            step.priority = max(step.priority, priority)
            if selective and step.spilled < step.resident:
                self.spill_queue[step] = None
            step = step.parent

    def _take_rolling(self, lease: Lease) -> None:
        for group in self.layout.state:
            if self.sparse[group].num_available:
                lease.rolling += (HeldSlot(group, self.sparse[group].take(1)[0]),)
        self._trim_all()

    def _offer_leave(self, lease: Lease, room: int) -> tuple[SnapshotSlot, ...]:
        """Slots for the wanted boundaries in (lease.room, room], while there are any; a snapshot is never a refusal."""
        if room <= lease.room:
            return ()
        page_tokens = self.layout.page_tokens
        num_tokens = len(lease.prompt) // 4
        wanted = {(num_tokens - 1) // page_tokens, lease.matched, num_tokens // page_tokens}
        offered = []
        for boundary in sorted(wanted):
            if not lease.room < boundary * page_tokens <= room:
                continue
            for group in self.layout.state:
                if self.sparse[group].num_available:
                    slot = self.sparse[group].take(1)[0]
                    lease.leave += (LeaveSlot(group, boundary, slot),)
                    offered.append(SnapshotSlot(group, boundary * page_tokens, PageId(slot)))
        lease.room = room
        self._trim_all()
        return tuple(offered)

    def _grant(self, lease: Lease, plan: Plan, fetch: Transfer | None, leave: tuple[SnapshotSlot, ...] = ()) -> Grant:
        layout, page_tokens = self.layout, self.layout.page_tokens
        usable = (plan.usable if fetch is not None else plan.boundary) * page_tokens
        fetched = max(usable - lease.device_tokens, 0) if lease.fetched_any else 0
        tables = self.tables(lease)
        cached, match = usable - fetched, plan.match
        if not layout.state:
            return Grant(lease.sequence_id, usable, cached, fetched, tables, match, fetch)
        return Grant(
            sequence_id=lease.sequence_id,
            usable_tokens=usable,
            cached_tokens=cached,
            fetched_tokens=fetched,
            tables=tables,
            match=match,
            fetch=fetch,
            restore=() if fetch is not None else self._slots(lease.restore, usable),
            leave=leave,
            working=self._slots(lease.working, usable),
            rolling=self._slots(lease.rolling, usable),
        )

    @staticmethod
    def _slots(held: tuple[HeldSlot, ...], boundary: int) -> tuple[SnapshotSlot, ...]:
        return tuple(SnapshotSlot(slot.group, boundary, PageId(slot.slot)) for slot in held)

    def tables(self, lease: Lease) -> tuple[GroupPages, ...]:
        """Block tables from page 0 on; NO_PAGE where a window no longer reaches."""
        out = []
        for group, spec in enumerate(self.layout.specs):
            if spec.kind == GroupKind.FULL:
                out.append(GroupPages(group, 0, self._shared_pages(lease.node, group) + lease.private[group]))
            elif spec.kind == GroupKind.WINDOW:
                hold = lease.windows[group]
                out.append(GroupPages(group, 0, bytes(holes(hold.first)) + pack(hold.page_ids)))
        return tuple(out)

    @staticmethod
    def _shared_pages(node: Node, group: int) -> bytes:
        parts: list[bytes | bytearray] = []
        step = node
        while step.parent is not None:
            parts.append(step.pages[group])
            step = step.parent
        parts.reverse()
        return b"".join(parts)

    # Extend.

    def extend(self, lease: Lease, extend: Extend) -> ExtendGrant | Refusal:
        total = self.layout.pages(extend.num_tokens)
        never = self._can_never_extend(lease, total)
        detail = never or lacks_for_extend(self, lease, total)
        if detail:
            self.counters.refusals += 1
            reason = RefusalReason.NEVER_FITS if never else RefusalReason.NO_ROOM
            return Refusal(extend.sequence_id, reason, detail)
        pages = []
        held = full_end(self.layout, lease)
        if total > held:
            self.make_room(total - held)
            for group in self.layout.full:
                taken = self.pools[group].take(total - held)
                lease.private[group] += taken
                pages.append(GroupPages(group, held, taken))
        for group in self.layout.window:
            hold = lease.windows[group]
            if total > hold.end:
                ids = self.sparse[group].take(total - hold.end)
                pages.append(GroupPages(group, hold.end, pack(ids)))
                hold.page_ids += ids
        if not self.sparse:
            return ExtendGrant(extend.sequence_id, tuple(pages))
        self._trim_all()
        pages.sort()
        return ExtendGrant(extend.sequence_id, tuple(pages), self._offer_leave(lease, extend.num_tokens))

    def _can_never_extend(self, lease: Lease, total: int) -> str:
        layout = self.layout
        for group in (*layout.full, *layout.window):
            spec = layout.specs[group]
            first = 0
            if spec.kind == GroupKind.WINDOW:  # what a launch from the last extend's end on reads
                first = max(lease.windows[group].first, window_start(lease.room, spec, layout.page_tokens))
            if total - first > spec.num_pages:
                return f"{total - first} pages at once; group {spec.name} has {spec.num_pages}"
        return ""

    # Release.

    def release(self, lease: Lease, reason: ReleaseReason) -> None:
        if reason is ReleaseReason.FINISHED and lease.fetch is None:
            publishing.publish_rolling(self, lease)
        if lease.fetch is not None:
            fetching.orphan(self, lease)
        self.drop_holdings(lease)
        self.leases.remove(lease.sequence_id)

    def drop_holdings(self, lease: Lease) -> None:
        """Everything that the lease still holds; what is unpublished goes free."""
        for group in self.layout.full:
            self.pools[group].give(lease.private[group])
        for group, hold in lease.windows.items():
            self.sparse[group].drop(hold.page_ids, Rank.WARM)
        for held in (*lease.working, *lease.rolling, *lease.restore):
            self.sparse[held.group].drop((held.slot,), Rank.WARM)
        for leave in lease.leave:
            self.sparse[leave.group].drop((leave.slot,), Rank.WARM)
        self.unpin(lease.node)

    def unpin(self, node: Node) -> None:
        self.tree.unpin(node)
        if not self.layout.full:
            self.trim(node)

    # Eviction.

    def make_room(self, count: int) -> None:
        """Evict until every FULL group has `count` free pages."""
        for group in self.layout.full:
            self.evict(count - self.pools[group].num_free)

    def evict(self, count: int) -> None:
        """Cut exactly `count` pages off the tails of the policy's victims."""
        if count > 0:
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
        freed = count * len(self.layout.full)
        for group in self.layout.full:
            self.pools[group].give(removed[group])
        for group in self.layout.sparse:
            freed += self.sparse[group].discard(removed[group])
        return freed

    def _record_removed(self, node: Node, count: int) -> None:
        assert self.record is not None
        publishing.ensure_hashes(self, node)
        packed = bytes(node.hashes[(node.resident - count) * HASH_BYTES :])
        hashes = tuple(PageHash(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES))
        for group in self.layout.full or (0,):
            self.record(Removed(self.worker_id, group, hashes))

    # Without a FULL group nothing else shortens a path: places that hold no page any more are trimmed.

    def _trim_all(self) -> None:
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
