"""Whether a reply of the cache service fits this worker's pools.

A page id beyond the pool would be read from memory that is not the pool's, a hole in a table without holes from page 0.
Both raise StepRejected before any table changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from session.messages import Grant, StepReply
from session.words import NO_PAGE, PAGE_ID_BYTES, GroupKind, GroupPages, GroupSpec, StateSlot, Transfer
from worker_service.core.errors import StepRejected


class PoolCheck:
    """`take_limit` bounds a block table: the pages of one sequence."""

    def __init__(self, groups: Sequence[GroupSpec], page_tokens: int) -> None:
        self.groups = groups
        self._page_tokens = page_tokens
        self._max_pages = 0

    def take_limit(self, max_sequence_tokens: int) -> None:
        self._max_pages = -(-max_sequence_tokens // self._page_tokens)

    def reply(self, reply: StepReply) -> None:
        """Raises StepRejected for the first page id, group or page number out of range."""
        for grant in reply.grants:
            self._grant(grant)
        for extend in reply.extends:
            self._tables("extends", extend.pages)
            self._slots("extends.snapshots", extend.snapshots)
        for remap in reply.remaps:
            self._tables("remaps.pages", remap.pages)

    def order(self, transfer: Transfer) -> None:
        """Raises StepRejected when the order names what no pool has."""
        self._transfer("order.spill", transfer)

    def _grant(self, grant: Grant) -> None:
        self._tables("grants.tables", grant.tables)
        for field, slots in (
            ("restore", grant.restore),
            ("leave", grant.snapshots),
            ("working", grant.working),
            ("rolling", grant.rolling),
        ):
            self._slots(f"grants.{field}", slots)
        for fetch in grant.fetches:
            self._transfer("grants.fetches", fetch)

    def _tables(self, field: str, tables: Iterable[GroupPages]) -> None:
        for group, first_page, packed in tables:
            spec = self._spec(field, group)
            end = first_page + len(packed) // PAGE_ID_BYTES
            if end > self._max_pages:
                _reject(field, f"pages {first_page} to {end} are more than {self._max_pages}")
            if spec.kind is GroupKind.STATE and packed:
                _reject(field, f"group {group} has snapshot slots and no block table")
            lowest = self._ids(field, spec, packed)
            if spec.kind is GroupKind.FULL and lowest == NO_PAGE:
                _reject(field, f"group {group} has no holes")

    def _slots(self, field: str, slots: Iterable[StateSlot]) -> None:
        for group, boundary_tokens, slot in slots:
            spec = self._spec(field, group)
            if spec.kind is not GroupKind.STATE or not 1 <= slot <= spec.num_pages:
                _reject(field, f"slot {slot} of group {group} is none of its pool")
            if boundary_tokens > self._max_pages * self._page_tokens:
                _reject(field, f"boundary {boundary_tokens} is beyond the longest sequence")

    def _transfer(self, field: str, transfer: Transfer) -> None:
        for moved in transfer.groups:
            self._ids(field, self._spec(field, moved.group), moved.page_ids)

    def _spec(self, field: str, group: int) -> GroupSpec:
        if group >= len(self.groups):
            _reject(field, f"group {group} is none of {len(self.groups)}")
        return self.groups[group]

    def _ids(self, field: str, spec: GroupSpec, packed: bytes) -> int:
        """Returns the lowest id; that of no page at all is 1."""
        if len(packed) == PAGE_ID_BYTES:  # nearly all: what decode asks for
            lowest = highest = int.from_bytes(packed, "little")
        elif packed:
            ids = np.frombuffer(packed, "<u4")
            lowest, highest = int(ids.min()), int(ids.max())
        else:
            lowest = highest = 1
        if highest > spec.num_pages:
            _reject(field, f"page {highest} is beyond the {spec.num_pages} pages of group {spec.name}")
        return lowest


def _reject(field: str, reason: str) -> None:
    raise StepRejected(f"{field}: {reason}")
