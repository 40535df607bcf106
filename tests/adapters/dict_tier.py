"""A host tier in one dict: the service's resume rules told the slow way, for tests of what asks it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from adapters.vllm.layout import GroupKind, Layout
from adapters.vllm.tier import (
    PAGE_ID_BYTES,
    Found,
    GroupPages,
    LeaseEnd,
    PageRange,
    PagesRead,
    Path,
    Reserved,
    TransferStatus,
    WrittenPages,
)


@dataclass
class DictTier:
    """Both a PageIndex and a PageStore. `rows` are findable, `values` stand in the store; tests may break either."""

    layout: Layout
    num_ranks: int = 1
    rows: set[tuple[int, bytes]] = field(default_factory=set)
    values: dict[bytes, bytes] = field(default_factory=dict)
    held: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    tickets: dict[int, tuple[GroupPages, ...]] = field(default_factory=dict)
    commits: dict[int, dict[int, dict[int, int]]] = field(default_factory=dict)
    ends: list[LeaseEnd] = field(default_factory=list)
    lookups: list[tuple[Path, int]] = field(default_factory=list)
    away: bool = False
    store_fails: bool = False
    last_number: int = 0

    def hashes(self, path: Path) -> list[bytes]:
        ids = [path.page_ids[at : at + PAGE_ID_BYTES] for at in range(0, len(path.page_ids), PAGE_ID_BYTES)]
        return [hashlib.sha256(f"{path.adapter}\0{path.salt}\0".encode() + one).digest() for one in ids]

    def lookup(self, path: Path, local_pages: int) -> Found:
        self.lookups.append((path, local_pages))
        hashes = self.hashes(path)
        usable = max(end for end in range(local_pages, len(hashes) + 1) if self._can_resume(hashes, local_pages, end))
        if self.away or usable == local_pages:
            return Found(local_pages)
        self.last_number += 1
        self.held[self.last_number] = tuple(hashes[local_pages:usable])
        pages = []
        for group in range(len(self.layout.groups)):
            numbers = tuple(range(self._first(group, local_pages, usable), usable))
            pages.append(GroupPages(group, self._prefix(group), numbers, tuple(hashes[page] for page in numbers)))
        return Found(usable, self.last_number, tuple(pages))

    def reserve(self, path: Path, ranges: Sequence[PageRange]) -> Reserved:
        hashes = self.hashes(path)
        pages = []
        for group in range(len(self.layout.groups)):
            asked = [one for one in ranges if one.group == group]
            numbers = [page for one in asked for page in range(one.first_page, one.first_page + one.num_pages)]
            wanted = tuple(page for page in numbers if (group, hashes[page]) not in self.rows)
            if wanted:
                pages.append(GroupPages(group, self._prefix(group), wanted, tuple(hashes[page] for page in wanted)))
        if self.away or not pages:
            return Reserved()
        self.last_number += 1
        self.tickets[self.last_number] = tuple(pages)
        return Reserved(self.last_number, tuple(pages))

    def commit(self, ticket: int, rank: int, status: TransferStatus, written: Sequence[WrittenPages]) -> None:
        if ticket not in self.tickets:
            return
        of_ranks = self.commits.setdefault(ticket, {})
        of_ranks[rank] = {one.group: one.num_pages for one in written}
        if len(of_ranks) < self.num_ranks:
            return
        for pages in self.tickets.pop(ticket):
            num_written = min(one.get(pages.group, 0) for one in of_ranks.values())
            self.rows.update((pages.group, page_hash) for page_hash in pages.page_hashes[:num_written])

    def release(self, end: LeaseEnd) -> None:
        self.ends.append(end)
        hashes = self.held.pop(end.lease)
        if end.status in (TransferStatus.MISSING, TransferStatus.CORRUPT):
            self.rows -= {(group, hashes[end.num_pages]) for group in range(len(self.layout.groups))}

    def is_away(self) -> bool:
        return self.away

    def close(self) -> None:
        pass

    def get(self, keys: Sequence[bytes], page_bytes: int) -> PagesRead:
        found: list[memoryview] = []
        for key in keys:
            if self.store_fails or key not in self.values:
                return PagesRead(found, TransferStatus.FAILED if self.store_fails else TransferStatus.MISSING)
            payload = bytearray(self.values[key][32:])
            if hashlib.sha256(payload).digest() != self.values[key][:32] or len(payload) != page_bytes:
                return PagesRead(found, TransferStatus.CORRUPT)
            found.append(memoryview(payload))
        return PagesRead(found, TransferStatus.DONE)

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        if self.store_fails:
            return 0
        for key, page in zip(keys, pages, strict=True):
            self.values[key] = hashlib.sha256(page).digest() + bytes(page)
        return len(keys)

    def _can_resume(self, hashes: Sequence[bytes], local: int, end: int) -> bool:
        groups = range(len(self.layout.groups))
        return all(
            (group, hashes[page]) in self.rows
            for group in groups
            for page in range(self._first(group, local, end), end)
        )

    def _first(self, group: int, local: int, end: int) -> int:
        """The first page that resuming at `end` reads of the group."""
        spec = self.layout.groups[group]
        if spec.kind is GroupKind.FULL or end == local:
            return local
        return max(local, max(0, end * self.layout.page_tokens - (spec.window_tokens - 1)) // self.layout.page_tokens)

    def _prefix(self, group: int) -> str:
        return f"test:{group}:"
