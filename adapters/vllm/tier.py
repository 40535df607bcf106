"""The host tier as the connector uses it: parts of the client's `HostTierCalls` and `PageStore`.

Both return soon and raise nothing. When the cache service or the store is away, a lookup finds nothing, a reserve takes
nothing, and reads and writes have failed: the engine computes as if there were no tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from session.words import TransferStatus
from tier_client.page_store import Buffer, Read
from tier_client.values import Hit, PagePath, PageRange, Ticket


class PageIndex(Protocol):
    """Called in a thread of the connector's own. None: no reply."""

    def lookup(self, path: PagePath, local_pages: int) -> Hit | None: ...

    def reserve(self, path: PagePath, ranges: Iterable[PageRange]) -> Ticket | None: ...

    def commit(
        self, ticket: Ticket, rank: int, written: Sequence[tuple[int, int]], status: TransferStatus
    ) -> int | None: ...

    def release(self, hit: Hit, num_pages: int, status: TransferStatus) -> bool: ...

    def was_read(self, num_bytes: int, took_s: float) -> None:
        """Counts what a worker read, and how long that took."""
        ...

    def is_away(self) -> bool:
        """Returns whether calls would find and take nothing at the moment. Does not wait."""
        ...

    def close(self) -> None: ...


class PageStore(Protocol):
    """Values in the store. Several threads call it."""

    def read(self, group: int, keys: Sequence[bytes], page_bytes: int) -> Read: ...

    def write(self, group: int, keys: Sequence[bytes], payloads: Sequence[Buffer]) -> tuple[int, TransferStatus]: ...

    def close(self) -> None: ...
