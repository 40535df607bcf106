"""STATE: which slots a sequence gets, and where it leaves snapshots: at page boundaries. The one at b is page b - 1.

Where a sequence leaves them, as far as there are slots:

    wanted    the last boundary of its whole pages, the last one at which this very prompt could resume, the one where
              it parts from cached KV, those where others are known to part from it (`leave_at`), and the last one
              that its decode crossed
    guessed   each multiple of `state_interval_tokens`, and the end of each chunk

A wanted one may evict other snapshots. A guess takes a vacant slot or, at an interval, that of another guess, and
leaves RESERVED_SLOTS for the next sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cache_service.core.base.stats import GroupStats
from cache_service.core.device.eviction_order import EvictionPolicy
from cache_service.core.device.lease_table import Lease
from cache_service.core.device.page_pool import pack, unpack
from cache_service.core.device.radix_node import Node, Packed
from cache_service.core.device.snapshot_order import SnapshotPages
from cache_service.core.device.sparse_pages import Retention
from cache_service.core.kinds.sparse_group import SparseGroup
from session.messages import Acquire, Adopt, Grant
from session.words import PAGE_ID_BYTES, TOKEN_BYTES, GroupPages, GroupSpec, MissReason, PageId, StateSlot

# What a guess leaves to others until it is published: the next sequence's working and rolling slots.
RESERVED_SLOTS = 2


@dataclass(slots=True)
class StateNeed:
    """A working slot, and the snapshot at the boundary: `restore` is its slot, 0 at the start or if it `is_fetched`."""

    restore: int
    is_fetched: bool


@dataclass(slots=True)
class StateHold:
    """Slots; 0 for none. `snapshots`: by boundary, private ones that a launch is to fill."""

    working: int
    rolling: int = 0
    restore: int = 0  # read until the launch that restores it is reported
    snapshots: dict[int, int] = field(default_factory=dict)


class StateGroup(SparseGroup):
    has_table: ClassVar[bool] = False
    miss_reason: ClassVar[MissReason] = MissReason.NO_SNAPSHOT
    unit: ClassVar[str] = "slots"

    def __init__(self, number: int, spec: GroupSpec, page_tokens: int, policy: EvictionPolicy) -> None:
        self.snapshots = SnapshotPages(number, spec, policy)
        super().__init__(number, spec, page_tokens, self.snapshots)
        self.num_taken = self.num_restored = 0

    def resume(self, resident: bytes, limit: int) -> int:
        return resident.rfind(b"\1", 0, limit) + 1

    def reach_pages(self) -> int:
        return 1

    def fetch_bytes(self, matched: int, boundary: int) -> int:
        return self.spec.page_bytes

    def need(self, page_ids: bytes, boundary: int, acquire: Acquire) -> StateNeed:
        if not boundary:
            return StateNeed(0, is_fetched=False)
        slot = int.from_bytes(page_ids[(boundary - 1) * PAGE_ID_BYTES : boundary * PAGE_ID_BYTES], "little")
        return StateNeed(slot, is_fetched=not slot)

    def lacks(self, needs: dict[int, Any], num_pages: int) -> bool:
        """Returns whether a slot is lacking; an extend needs none."""
        need: StateNeed | None = needs[self.number]
        if need is None:
            return False
        restored = need.restore > 0 and self.pages.is_unread(need.restore)
        return self.pages.num_available - restored < 1 + need.is_fetched

    def take(self, lease: Lease, needs: dict[int, Any], num_pages: int) -> None:
        need: StateNeed = needs[self.number]
        if need.restore:
            self.pages.read((need.restore,))
        lease.holds[self.number] = StateHold(self._slot(), restore=need.restore)

    def _slot(self) -> int:
        return self.pages.take(1)[0]

    def targets(self, lease: Lease, needs: dict[int, Any], boundary: int) -> GroupPages:
        need: StateNeed = needs[self.number]
        if not need.is_fetched:
            return GroupPages(self.number, boundary, b"")
        slot = lease.holds[self.number].snapshots[boundary] = self._slot()
        return GroupPages(self.number, boundary - 1, pack([slot]))

    def admit(self, lease: Lease) -> None:
        if self.pages.num_available and not lease.bypass:
            lease.holds[self.number].rolling = self._slot()

    def offer(self, lease: Lease, room_tokens: int) -> Sequence[StateSlot]:
        if lease.bypass:
            return ()
        start, end = lease.room_tokens // self.page_tokens, room_tokens // self.page_tokens
        if start >= end:
            return ()
        snapshots: dict[int, int] = lease.holds[self.number].snapshots
        offered: list[int] = []
        # The lease's own first: they are the likeliest to be hit.
        for wanted in (self._own(lease), lease.leave_at):
            for boundary in sorted(wanted):
                if start < boundary <= end and boundary not in snapshots and self.pages.num_available:
                    snapshots[boundary] = self._slot()
                    offered.append(boundary)
        for boundary in self._guesses(lease, start, end):
            snapshots[boundary] = self._slot()
            offered.append(boundary)
        offered.sort()
        return [
            StateSlot(self.number, boundary * self.page_tokens, PageId(snapshots[boundary])) for boundary in offered
        ]

    def _own(self, lease: Lease) -> set[int]:
        return set(lease.resume_boundaries(self.page_tokens, lease.matched_pages))

    def _guesses(self, lease: Lease, start: int, end: int) -> list[int]:
        """Returns the boundaries in (start, end] for which there are slots to spare; nothing is taken yet."""
        snapshots: dict[int, int] = lease.holds[self.number].snapshots
        num_vacant = max(self.pool.num_free - RESERVED_SLOTS, 0)
        num_slots = max(self.pool.num_free + self.snapshots.num_cold - RESERVED_SLOTS, 0)
        last = min(end, len(lease.prompt) // TOKEN_BYTES // self.page_tokens)
        guesses: list[int] = []
        interval = self.spec.state_interval_tokens // self.page_tokens
        if interval and num_slots:
            spaced = range(start // interval * interval + interval, last + 1, interval)
            missing = [boundary for boundary in spaced if boundary not in snapshots]
            # With fewer slots than boundaries, as evenly as they go.
            step = -(-len(missing) // num_slots) or 1
            guesses = missing[step - 1 :: step]
        if end <= last and end not in snapshots and end not in guesses and len(guesses) < num_vacant:
            guesses.append(end)
        return guesses

    def describe(self, grant: Grant, lease: Lease) -> Grant:
        hold, tokens = lease.holds[self.number], grant.usable_tokens
        return grant._replace(
            working=grant.working + self._named(hold.working, tokens),
            rolling=grant.rolling + self._named(hold.rolling, tokens),
            restore=grant.restore if grant.fetches else grant.restore + self._named(hold.restore, tokens),
        )

    def _named(self, slot: int, tokens: int) -> tuple[StateSlot, ...]:
        return (StateSlot(self.number, tokens, PageId(slot)),) if slot else ()

    def publish(self, lease: Lease) -> Sequence[Node]:
        """Publishes snapshots whose boundary a completed launch has passed; drops restored ones, which it read."""
        hold: StateHold = lease.holds[self.number]
        computed = min(lease.computed_tokens // self.page_tokens, lease.published_pages)
        passed = [boundary for boundary in hold.snapshots if boundary <= computed]
        nodes: list[Node] = []
        if passed:
            wanted = self._own(lease) | lease.leave_at
            for boundary in passed:
                retention = Retention.WARM if boundary in wanted else Retention.COLD
                nodes += self._publish_slot(lease, boundary, hold.snapshots.pop(boundary), retention)
            self.num_taken += len(nodes)
        if hold.restore and lease.computed_tokens > lease.resumed_pages * self.page_tokens:
            self.snapshots.drop_restored(hold.restore)
            self.num_restored += 1
            hold.restore = 0
        return nodes

    def finish(self, lease: Lease, boundary: int) -> Sequence[Node]:
        hold: StateHold = lease.holds[self.number]
        if not hold.rolling or not 0 < boundary <= lease.published_pages:
            return ()
        slot, hold.rolling = hold.rolling, 0
        nodes = self._publish_slot(lease, boundary, slot, Retention.WARM)
        self.num_taken += len(nodes)
        return nodes

    def arrive(self, lease: Lease, page_ids: bytes, first: int, end: int) -> Sequence[Node]:
        snapshots: dict[int, int] = lease.holds[self.number].snapshots
        nodes: list[Node] = []
        for page, slot in enumerate(unpack(page_ids), first):
            if slot and page < end:
                nodes += self._publish_slot(lease, page + 1, snapshots.pop(page + 1), Retention.WARM)
        return nodes

    def _publish_slot(self, lease: Lease, boundary: int, slot: int, retention: Retention) -> list[Node]:
        """Gives a private slot to the tree; where there is a snapshot already, the slot is freed. Returns the node that
        holds more now, if any does."""
        node = lease.node.holder(boundary - 1)
        is_new = self._fill(node, boundary - 1, slot)
        self.pages.drop((slot,), retention)
        if is_new:
            return [node]
        if retention is Retention.WARM:
            self.snapshots.warm(node.page_id(self.number, boundary - 1))
        return []

    def stats(self, evictable: int, evicted: int) -> GroupStats:
        counted = super().stats(evictable, evicted)
        return counted._replace(num_snapshots_taken=self.num_taken, num_snapshots_restored=self.num_restored)

    def held(self, lease: Lease) -> Packed:
        hold: StateHold = lease.holds[self.number]
        return pack(filter(None, (hold.working, hold.rolling, hold.restore, *hold.snapshots.values())))

    def claim(self, adopt: Adopt, standing: bytes) -> Any:
        slots = [slot.slot for slot in (*adopt.working, *adopt.rolling) if slot.group == self.number]
        return self._taken(slots, "slot") or StateHold(slots[0], slots[1] if len(slots) > 1 else 0)

    def adopt(self, lease: Lease, claim: StateHold) -> None:
        lease.holds[self.number] = claim
        self.pages.claim(frozenset(unpack(self.held(lease))))
