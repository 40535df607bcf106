"""What the connector asks of the host tier. Whoever implements it answers soon and raises nothing.

When the cache service or the store is away, a lookup finds nothing, a reserve takes nothing, and reads and writes end
with FAILED: the engine computes as if there were no tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

PAGE_ID_BYTES = 32


class TransferStatus(IntEnum):
    """As in protos/v1/cache.proto."""

    DONE = 1
    MISSING = 2
    FAILED = 3
    CORRUPT = 4


class Path(NamedTuple):
    """Page ids of an engine's own, 32 bytes each, packed."""

    adapter: str
    salt: str
    page_ids: bytes


class GroupPages(NamedTuple):
    """Pages of one group: their numbers in a path, rising, and a hash for each. `group` counts the declared groups."""

    group: int
    key_prefix: str
    pages: tuple[int, ...]
    page_hashes: tuple[bytes, ...]

    def keys(self, rank: int) -> list[bytes]:
        """Where the store keeps this rank's values."""
        return [f"{self.key_prefix}{rank}:{page_hash.hex()}".encode() for page_hash in self.page_hashes]


class PageRange(NamedTuple):
    group: int
    first_page: int
    num_pages: int


class Found(NamedTuple):
    """The engine can resume at the end of `usable_pages` when it has read `pages`. `lease` is 0 without any."""

    usable_pages: int = 0
    lease: int = 0
    pages: tuple[GroupPages, ...] = ()


class Reserved(NamedTuple):
    """`ticket` is 0 where nothing is to be written."""

    ticket: int = 0
    pages: tuple[GroupPages, ...] = ()


class WrittenPages(NamedTuple):
    """The first `num_pages` of a group's pages in a ticket were acknowledged by the store."""

    group: int
    num_pages: int


class LeaseEnd(NamedTuple):
    """`num_pages`: of the pages from the lookup's `local_pages` on, how many of the first were read in every group."""

    lease: int
    status: TransferStatus
    num_pages: int


class PagesRead(NamedTuple):
    """The leading pages that were there and right; `status` says what was wrong with the next one."""

    pages: list[memoryview]
    status: TransferStatus


class PageIndex(Protocol):
    """Calls of the service HostTier; the connector makes them in a thread of its own, one at a time."""

    def lookup(self, path: Path, local_pages: int) -> Found: ...

    def reserve(self, path: Path, ranges: Sequence[PageRange]) -> Reserved: ...

    def commit(self, ticket: int, rank: int, status: TransferStatus, written: Sequence[WrittenPages]) -> None: ...

    def release(self, end: LeaseEnd) -> None: ...

    def is_away(self) -> bool:
        """Whether calls would find and take nothing at the moment. Does not wait."""
        ...

    def close(self) -> None: ...


class PageStore(Protocol):
    """Values in the store. Several threads call it."""

    def get(self, keys: Sequence[bytes], page_bytes: int) -> PagesRead: ...

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> int:
        """Returns how many of the first pages were stored."""
        ...

    def close(self) -> None: ...
