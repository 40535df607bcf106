"""STATE: snapshots at page boundaries. A sequence resumes at b when there is one at b; it is page number b - 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cache_service.core.device.lease_table import Lease
from cache_service.core.device.page_pool import pack, unpack
from cache_service.core.device.radix_node import Node, Packed
from cache_service.core.device.sparse_pages import Retention
from cache_service.core.kinds.group import SparseGroup
from session.messages import Acquire, Adopt, Grant
from session.words import PAGE_ID_BYTES, GroupPages, MissReason, PageId, SnapshotSlot


@dataclass(slots=True)
class StateNeed:
    """A working slot, and the snapshot at the boundary: `restore` is its slot, 0 at the start or if it `is_fetched`."""

    restore: int
    is_fetched: bool


@dataclass(slots=True)
class StateHold:
    """Slots; 0 for none. `leave`: by boundary, private ones in which a launch is to leave its snapshot."""

    working: int
    rolling: int = 0
    restore: int = 0  # read until the launch that restores it is reported
    leave: dict[int, int] = field(default_factory=dict)


class StateGroup(SparseGroup):
    has_table: ClassVar[bool] = False
    miss_reason: ClassVar[MissReason] = MissReason.NO_SNAPSHOT
    unit: ClassVar[str] = "slots"

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
        """An extend needs no slot."""
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
        slot = lease.holds[self.number].leave[boundary] = self._slot()
        return GroupPages(self.number, boundary - 1, pack([slot]))

    def admit(self, lease: Lease) -> None:
        if self.pages.num_available and not lease.bypass:
            lease.holds[self.number].rolling = self._slot()

    def offer(self, lease: Lease, room_tokens: int) -> Sequence[SnapshotSlot]:
        offered: list[SnapshotSlot] = []
        if lease.bypass:
            return offered
        for boundary in sorted(set(lease.resume_boundaries(self.page_tokens, lease.matched_pages))):
            tokens = boundary * self.page_tokens
            if lease.room_tokens < tokens <= room_tokens and self.pages.num_available:
                slot = lease.holds[self.number].leave[boundary] = self._slot()
                offered.append(SnapshotSlot(self.number, tokens, PageId(slot)))
        return offered

    def describe(self, grant: Grant, lease: Lease) -> Grant:
        hold, tokens = lease.holds[self.number], grant.usable_tokens
        return grant._replace(
            working=grant.working + self._named(hold.working, tokens),
            rolling=grant.rolling + self._named(hold.rolling, tokens),
            restore=grant.restore if grant.fetches else grant.restore + self._named(hold.restore, tokens),
        )

    def _named(self, slot: int, tokens: int) -> tuple[SnapshotSlot, ...]:
        return (SnapshotSlot(self.number, tokens, PageId(slot)),) if slot else ()

    def publish(self, lease: Lease) -> Sequence[Node]:
        """Snapshots whose boundary a completed launch has passed; what was restored is read no more."""
        hold: StateHold = lease.holds[self.number]
        computed = min(lease.computed_tokens // self.page_tokens, lease.published_pages)
        passed = [boundary for boundary in hold.leave if boundary <= computed]
        nodes = self._publish_slots(lease, {boundary: hold.leave.pop(boundary) for boundary in passed})
        if hold.restore and lease.computed_tokens > lease.resumed_pages * self.page_tokens:
            self.pages.drop((hold.restore,), Retention.WARM)
            hold.restore = 0
        return nodes

    def finish(self, lease: Lease, boundary: int) -> Sequence[Node]:
        hold: StateHold = lease.holds[self.number]
        if not hold.rolling or not 0 < boundary <= lease.published_pages:
            return ()
        slot, hold.rolling = hold.rolling, 0
        return self._publish_slots(lease, {boundary: slot})

    def arrive(self, lease: Lease, page_ids: bytes, first: int, end: int) -> Sequence[Node]:
        leave: dict[int, int] = lease.holds[self.number].leave
        arrived = [page + 1 for page, slot in enumerate(unpack(page_ids), first) if slot and page < end]
        return self._publish_slots(lease, {boundary: leave.pop(boundary) for boundary in arrived})

    def _publish_slots(self, lease: Lease, slots: dict[int, int]) -> list[Node]:
        """Give private slots to the tree, by boundary; where there is a snapshot already, the slot is freed."""
        nodes = []
        for boundary, slot in slots.items():
            node = lease.node.holder(boundary - 1)
            if self._fill(node, boundary - 1, slot):
                nodes.append(node)
            self.pages.drop((slot,), Retention.WARM)
        return nodes

    def held(self, lease: Lease) -> Packed:
        hold: StateHold = lease.holds[self.number]
        return pack(filter(None, (hold.working, hold.rolling, hold.restore, *hold.leave.values())))

    def claim(self, adopt: Adopt, standing: bytes) -> Any:
        slots = [slot.slot for slot in (*adopt.working, *adopt.rolling) if slot.group == self.number]
        return self._taken(slots, "slot") or StateHold(slots[0], slots[1] if len(slots) > 1 else 0)

    def adopt(self, lease: Lease, claim: StateHold) -> None:
        lease.holds[self.number] = claim
        self.pages.claim(frozenset(unpack(self.held(lease))))
