"""A host tier in one dict: the service's resume rules told the slow way, for tests of what asks it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from adapters.vllm.layout import Layout
from session.words import HASH_BYTES, GroupKind, TransferStatus
from tier_client.page_store import Buffer, Read
from tier_client.values import Hit, KeyedPages, PagePath, PageRange, Ticket


class LeaseEnd(NamedTuple):
    status: TransferStatus
    num_pages: int


@dataclass
class DictTier:
    """In place of HostTierCalls and PageStore. `rows` are findable, `values` are stored; tests may break either."""

    layout: Layout
    num_ranks: int = 1
    rows: set[tuple[int, bytes]] = field(default_factory=set)
    values: dict[bytes, bytes] = field(default_factory=dict)
    held: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    tickets: dict[int, tuple[KeyedPages, ...]] = field(default_factory=dict)
    commits: dict[int, dict[int, dict[int, int]]] = field(default_factory=dict)
    ends: list[LeaseEnd] = field(default_factory=list)
    lookups: list[tuple[PagePath, int]] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    away: bool = False
    store_fails: bool = False
    room: int = 1 << 30
    last_number: int = 0

    def hashes(self, path: PagePath) -> list[bytes]:
        ids = [path.page_ids[at : at + HASH_BYTES] for at in range(0, len(path.page_ids), HASH_BYTES)]
        return [hashlib.sha256(f"{path.adapter}\0{path.salt}\0".encode() + one).digest() for one in ids]

    def lookup(self, path: PagePath, local_pages: int) -> Hit:
        self.lookups.append((path, local_pages))
        hashes = self.hashes(path)
        usable = max(end for end in range(local_pages, len(hashes) + 1) if self._can_resume(hashes, local_pages, end))
        if self.away or usable == local_pages:
            return Hit(local_pages, local_pages)
        self.last_number += 1
        self.held[self.last_number] = tuple(hashes[local_pages:usable])
        pages = []
        for group in range(len(self.layout.groups)):
            numbers = tuple(range(self._first(group, local_pages, usable), usable))
            pages.append(KeyedPages(group, self._prefix(group), numbers, tuple(hashes[page] for page in numbers)))
        return Hit(usable, local_pages, self.last_number, tuple(pages))

    def reserve(self, path: PagePath, ranges: Iterable[PageRange]) -> Ticket:
        hashes, ranges = self.hashes(path), list(ranges)
        pages = []
        for group in range(len(self.layout.groups)):
            asked = [one for one in ranges if one.group == group]
            numbers = [page for one in asked for page in range(one.first_page, one.end_page)]
            wanted = tuple(page for page in numbers if (group, hashes[page]) not in self.rows)
            if wanted:
                pages.append(KeyedPages(group, self._prefix(group), wanted, tuple(hashes[page] for page in wanted)))
        if self.away or not pages:
            return Ticket()
        self.last_number += 1
        self.tickets[self.last_number] = tuple(pages)
        return Ticket(self.last_number, tuple(pages))

    def commit(
        self, ticket: Ticket, rank: int, written: Sequence[tuple[int, int]], status: TransferStatus
    ) -> int | None:
        if ticket.number not in self.tickets:
            return None
        of_ranks = self.commits.setdefault(ticket.number, {})
        of_ranks[rank] = dict(written)
        if len(of_ranks) < self.num_ranks:
            return 0
        for pages in self.tickets.pop(ticket.number):
            num_written = min(one.get(pages.group, 0) for one in of_ranks.values())
            self.rows.update((pages.group, page_hash) for page_hash in pages.page_hashes[:num_written])
        return len(self.rows)

    def release(self, hit: Hit, num_pages: int, status: TransferStatus) -> bool:
        self.ends.append(LeaseEnd(status, num_pages))
        hashes = self.held.pop(hit.lease)
        if status in (TransferStatus.MISSING, TransferStatus.CORRUPT):
            self.rows -= {(group, hashes[num_pages]) for group in range(len(self.layout.groups))}
        return True

    def was_read(self, num_bytes: int, took_s: float) -> None:
        self.reads.append(num_bytes)

    def is_away(self) -> bool:
        return self.away

    def close(self) -> None:
        pass

    def read(self, group: int, keys: Sequence[bytes], page_bytes: int) -> Read:
        found: list[memoryview] = []
        for key in keys:
            if self.store_fails or key not in self.values:
                return Read(found, TransferStatus.FAILED if self.store_fails else TransferStatus.MISSING)
            payload = bytearray(self.values[key][32:])
            if hashlib.sha256(payload).digest() != self.values[key][:32] or len(payload) != page_bytes:
                return Read(found, TransferStatus.CORRUPT)
            found.append(memoryview(payload))
        return Read(found, TransferStatus.DONE)

    def write(self, group: int, keys: Sequence[bytes], payloads: Sequence[Buffer]) -> tuple[int, TransferStatus]:
        if self.store_fails:
            return 0, TransferStatus.FAILED
        kept = min(len(keys), self.room)
        self.room -= kept
        for key, page in zip(keys[:kept], payloads, strict=False):
            self.values[key] = hashlib.sha256(page).digest() + bytes(page)
        return kept, TransferStatus.DONE

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
        if spec.kind is GroupKind.STATE:
            return end - 1
        return max(local, max(0, end * self.layout.page_tokens - (spec.window_tokens - 1)) // self.layout.page_tokens)

    def _prefix(self, group: int) -> str:
        return f"test:{group}:"
