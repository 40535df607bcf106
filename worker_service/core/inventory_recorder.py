"""Tells the inventory what steps and their replies say of pages.

a publish goes out      its pages wait: the reply may put other pages of the same content in their place
its reply comes         remaps first, then what waits is recorded, then pages granted for writing are forgotten
the service is gone     what waits is recorded as it was written, and what live sequences computed since
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from session.messages import ExtendGrant, Forget, Grant, Remap
from session.words import PAGE_ID_BYTES, GroupPages, SequenceId, StateSlot
from worker_service.core.inventory import Inventory, Written
from worker_service.core.sequence import Sequence


class Recorder:
    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._waiting: dict[SequenceId, Written] = {}  # published by the unanswered step
        self.last_forget = 0  # number of the last Forget of this epoch
        self.confirmed = 0  # and of the last one that a step confirmed

    # -- what a step publishes --

    def published(self, sequence: Sequence) -> None:
        """The step publishes what the sequence has computed; called before `published_len` says so."""
        written = self._written(sequence)
        if written is not None:
            self._waiting[sequence.sequence_id] = written

    def released(self, sequence: Sequence, rolling_tokens: int) -> None:
        """The step ends the lease; its rolling slots hold the state at that boundary, if it is not 0."""
        if not rolling_tokens or sequence.request.bypass_cache:
            return
        page = rolling_tokens // self._inventory.page_tokens - 1
        snapshots = tuple((slot.group, slot.slot, page) for slot in sequence.rolling)
        waiting = self._waiting.get(sequence.sequence_id)
        if waiting is None:
            tables = [table[page:] for table in sequence.tables]
            waiting = Written(sequence.namespace, sequence.tokens, tables, page, page + 1, page + 1)
        self._waiting[sequence.sequence_id] = waiting._replace(snapshots=waiting.snapshots + snapshots)

    def _written(self, sequence: Sequence) -> Written | None:
        """What was computed since the last publish; None where that is nothing to keep."""
        size = self._inventory.page_tokens
        first, end = sequence.published_len // size, sequence.computed_len // size
        left, sequence.written_snapshots = sequence.written_snapshots, ()
        if self._inventory.leading is None or sequence.request.bypass_cache or first >= end:
            return None
        base = max(first - 1, 0)
        tables = [table[base:end] for table in sequence.tables]
        snapshots = tuple((slot.group, slot.slot, slot.boundary_tokens // size - 1) for slot in left)
        return Written(sequence.namespace, sequence.tokens, tables, base, first, end, snapshots)

    # -- what its reply says --

    def answered(self, remaps: Iterable[Remap]) -> None:
        """Records what the step published. Before the grants of the same reply, which may name freed pages."""
        for remap in remaps:
            waiting = self._waiting.get(remap.sequence_id)
            if waiting is not None:
                for pages in remap.pages:
                    _show(waiting, pages)
        self.record_unanswered()

    def granted(self, grant: Grant) -> None:
        """Pages behind the usable ones are to be written, and those that a fetch is to fill, at once."""
        forget = self._inventory.forget_pages
        for fetch in grant.fetches:
            for moved in fetch.groups:
                forget(moved.group, _ids(moved.page_ids))
        if grant.fetches:
            return
        usable = grant.usable_tokens // self._inventory.page_tokens
        for pages in grant.tables:
            at = max(usable - pages.first_page, 0)
            forget(pages.group, _ids(pages.page_ids, at))
            if at and pages.group == self._inventory.leading:
                # Windows of other groups need all pages that they reach: without one, nothing resumes here.
                self._inventory.use(_ids(pages.page_ids, max(at - self._inventory.reach_pages, 0), at))
        for slots in (grant.snapshots, grant.working, grant.rolling):
            self._kill_slots(slots)

    def fetched(self, sequence: Sequence, grant: Grant) -> None:
        """The grant after a fetch: what is usable was on the device, or has arrived. The tables are the grant's."""
        usable = grant.usable_tokens // self._inventory.page_tokens
        if sequence.request.bypass_cache or not usable:
            return
        snapshots = tuple((slot.group, slot.slot, usable - 1) for slot in grant.restore)
        tables = sequence.tables
        self._inventory.record(Written(sequence.namespace, sequence.tokens, tables, 0, 0, usable, snapshots))

    def extended(self, extend: ExtendGrant) -> None:
        for pages in extend.pages:
            self._inventory.forget_pages(pages.group, _ids(pages.page_ids))
        self._kill_slots(extend.snapshots)

    def _kill_slots(self, slots: Iterable[StateSlot]) -> None:
        for slot in slots:
            self._inventory.forget_pages(slot.group, (slot.slot,))

    # -- losses --

    def lost(self, sequences: Iterable[Sequence]) -> None:
        """The service has a new state. These sequences have leases, and what they computed is not in doubt."""
        self.record_unanswered()
        self.computed(sequences)
        self.last_forget = self.confirmed = 0

    def computed(self, sequences: Iterable[Sequence]) -> None:
        """Records what these sequences have computed since the last publish, which no step will publish."""
        for sequence in sequences:
            written = self._written(sequence)
            if written is not None:
                self._inventory.record(written)
            sequence.published_len = sequence.computed_len

    def forget(self, forget: Forget) -> None:
        """Clear calls dropped these namespaces; the next step confirms it."""
        cleared = None if forget.everything else forget.namespaces
        self._inventory.forget(cleared)
        for sequence_id, written in list(self._waiting.items()):
            if cleared is None or written.namespace in cleared:
                del self._waiting[sequence_id]
        self.last_forget = max(self.last_forget, forget.number)

    def take_confirmation(self) -> int:
        """Returns what a step has to confirm; 0: nothing new."""
        if self.last_forget == self.confirmed:
            return 0
        self.confirmed = self.last_forget
        return self.last_forget

    def record_unanswered(self) -> None:
        """Records what was published, as it was written: no reply will say otherwise."""
        for written in self._waiting.values():
            self._inventory.record(written)
        self._waiting.clear()


def _ids(packed: bytes, first: int = 0, end: int | None = None) -> array[int]:
    ids = array("I")
    ids.frombytes(memoryview(packed)[first * PAGE_ID_BYTES : end if end is None else end * PAGE_ID_BYTES])
    return ids


def _show(written: Written, pages: GroupPages) -> None:
    """Replaces pages of the chain by these."""
    table = written.tables[pages.group]
    for at, page_id in enumerate(_ids(pages.page_ids), pages.first_page - written.base):
        if 0 <= at < len(table):
            table[at] = page_id
