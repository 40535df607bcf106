"""The words of a session's messages: ids, enums, block tables, snapshots, transfers and matches. Values only.

Packed fields are little-endian bytes: tokens int32, page ids uint32 (0 = NO_PAGE, a hole), page hashes 32 bytes each.
The numbers of the enums are those of protos/v1.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, NewType

PageId = NewType("PageId", int)
PageHash = NewType("PageHash", bytes)
TicketId = NewType("TicketId", int)
SequenceId = NewType("SequenceId", int)
WorkerId = NewType("WorkerId", str)

NO_PAGE = PageId(0)
TOKEN_BYTES = 4
PAGE_ID_BYTES = 4
HASH_BYTES = 32


class GroupKind(IntEnum):
    """How cached pages of a group may be resumed from: docs/architecture.md has the rules."""

    FULL = 1
    WINDOW = 2
    STATE = 3


class MissReason(IntEnum):
    """Why the tokens after the usable ones were not reused."""

    UNSPECIFIED = 0  # nothing was matched yet, or a newer cache service names a reason that this version does not know
    NONE = 1
    NEVER_SEEN = 2
    EVICTED = 3
    PAGE_TAIL = 4
    NO_SNAPSHOT = 5
    WINDOW_GONE = 6
    OTHER_SALT = 7
    CLEARED = 8
    BYPASSED = 9
    FETCH_SLOWER = 10
    FETCH_BUSY = 11
    # Attached engines alone:
    REFUSED = 12
    NOT_WRITTEN = 13
    LOST = 14
    DAMAGED = 15
    # Of workers and of attached engines:
    BREAKER_OPEN = 16


class RefusalReason(IntEnum):
    NEVER_FITS = 1
    NO_ROOM = 2
    INVALID = 3
    RESEND = 4


class ReleaseReason(IntEnum):
    FINISHED = 1
    ABORTED = 2
    PREEMPTED = 3


class TransferStatus(IntEnum):
    DONE = 1
    MISSING = 2
    FAILED = 3
    CORRUPT = 4


class HostTierKind(IntEnum):
    NONE = 1
    PRIVATE = 2
    SHARED = 3


class Namespace(NamedTuple):
    """What must agree before KV may be shared: each has a radix tree of its own, and is part of every page's hash."""

    model: str
    adapter: str = ""
    salt: str = ""


class GroupSpec(NamedTuple):
    """A family of pages with one resume rule, and its pool on one worker.

    `num_pages` are usable ones, page 0 is reserved beyond them; `page_bytes` are those of a page's KV on one rank.
    `state_interval_tokens`, of a STATE group: how far apart the snapshots of a prompt are, beside those at the
    boundaries where later prompts are likely to resume; 0: only those. `replicated`: a page has the same bytes on each
    rank, and one value for all of them in the host tier.
    """

    name: str
    kind: GroupKind
    num_pages: int
    page_bytes: int = 0
    window_tokens: int = 0
    state_interval_tokens: int = 0
    replicated: bool = False


class GroupPages(NamedTuple):
    """Page ids of one group in a sequence's order, from page number `first_page` on."""

    group: int
    first_page: int
    page_ids: bytes


class StateSlot(NamedTuple):
    """A page of a STATE group: the snapshot at a page boundary, or the state in which a running sequence works."""

    group: int
    boundary_tokens: int
    slot: PageId


class TransferPages(NamedTuple):
    """A page id and a hash for each page of the transfer, packed; NO_PAGE where the group does not move that page."""

    group: int
    page_ids: bytes
    key_prefix: str
    page_hashes: bytes

    def key(self, page: int, rank: int) -> bytes:
        """Returns the store's key of a page, counted from the transfer's first one."""
        page_hash = self.page_hashes[HASH_BYTES * page : HASH_BYTES * (page + 1)]
        return f"{self.key_prefix}{rank}:{page_hash.hex()}".encode()


class Transfer(NamedTuple):
    """A run of pages to move between device and host tier, as a fetch ticket or a spill order.

    `num_pages` pages from page number `first_page` on; an Ack counts from `first_page`.
    """

    ticket: TicketId
    groups: tuple[TransferPages, ...]
    first_page: int
    num_pages: int


class Match(NamedTuple):
    """How far a prompt is cached on one worker, and why not further. Tokens throughout."""

    matched_tokens: int
    usable_tokens: int
    host_tokens: int
    limiting_group: str
    miss_reason: MissReason
