"""The words of the core: ids, requests, grants, refusals, orders and events. Values only, no behaviour.

Packed fields are little-endian bytes: tokens int32, page ids uint32 (0 = NO_PAGE, a hole), page hashes 32 bytes each.
"""

from __future__ import annotations

from enum import Enum, IntEnum
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
    """Resume rules; the numbers are the protocol's."""

    FULL = 1
    WINDOW = 2
    STATE = 3


class MissReason(IntEnum):
    """Why the tokens after the usable ones were not reused; the numbers are the protocol's."""

    NONE = 1
    NEVER_SEEN = 2
    EVICTED = 3
    PAGE_TAIL = 4
    NO_SNAPSHOT = 5
    WINDOW_GONE = 6
    OTHER_SALT = 7


class RefusalReason(IntEnum):
    NEVER_FITS = 1
    NO_ROOM = 2


class ReleaseReason(IntEnum):
    FINISHED = 1
    ABORTED = 2
    PREEMPTED = 3


class TransferStatus(IntEnum):
    DONE = 1
    MISSING = 2
    FAILED = 3


class HostTierKind(IntEnum):
    NONE = 1
    PRIVATE = 2
    SHARED = 3


class Residence(IntEnum):
    DEVICE = 1
    HOST = 2
    MISSING = 3


class SpillPolicy(Enum):
    WRITE_THROUGH = "write_through"
    SELECTIVE = "selective"
    WRITE_BACK = "write_back"


class FetchPolicy(Enum):
    AUTO = "auto"
    ALWAYS = "always"


class Namespace(NamedTuple):
    """What must agree before KV may be shared."""

    model: str
    adapter: str = ""
    salt: str = ""


class GroupSpec(NamedTuple):
    """A family of pages with one resume rule; `num_pages` are usable ones, page 0 is reserved beyond them."""

    name: str
    kind: GroupKind
    num_pages: int
    page_bytes: int = 0
    window_tokens: int = 0


class Hello(NamedTuple):
    worker_id: WorkerId
    endpoint: str
    incarnation: str
    fingerprint: bytes
    page_tokens: int
    groups: tuple[GroupSpec, ...]
    live_sequences: tuple[SequenceId, ...] = ()
    host_tier: HostTierKind = HostTierKind.NONE
    host_tier_id: str = ""
    num_ranks: int = 1


class Welcome(NamedTuple):
    epoch: str
    known_sequences: tuple[SequenceId, ...]
    last_step_id: int


class GroupPages(NamedTuple):
    """Page ids of one group in a sequence's order, from page number `first_page` on."""

    group: int
    first_page: int
    page_ids: bytes


class SnapshotSlot(NamedTuple):
    group: int
    boundary_tokens: int
    slot: PageId


class TransferPages(NamedTuple):
    """A page id and a key for each page of the transfer; NO_PAGE and b"" where the group does not move that page."""

    group: int
    page_ids: bytes
    keys: tuple[bytes, ...]


class Transfer(NamedTuple):
    """What a fetch ticket or a spill order moves: `num_pages` pages from page number `first_page` on."""

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


class Acquire(NamedTuple):
    sequence_id: SequenceId
    namespace: Namespace
    tokens: bytes
    reserve_pages: int = 0
    chunk_tokens: int = 0  # 0: the whole prompt in one launch
    priority: int = 0


class Grant(NamedTuple):
    """A sequence may run on these pages; while `fetch` is set it waits for that ticket's ack instead."""

    sequence_id: SequenceId
    usable_tokens: int
    cached_tokens: int
    fetched_tokens: int
    tables: tuple[GroupPages, ...]
    match: Match
    fetch: Transfer | None = None
    restore: tuple[SnapshotSlot, ...] = ()
    leave: tuple[SnapshotSlot, ...] = ()
    working: tuple[SnapshotSlot, ...] = ()
    rolling: tuple[SnapshotSlot, ...] = ()


class Refusal(NamedTuple):
    """No pages now; nothing changed."""

    sequence_id: SequenceId
    reason: RefusalReason
    detail: str


class Extend(NamedTuple):
    """Room for a length of `num_tokens`."""

    sequence_id: SequenceId
    num_tokens: int


class ExtendGrant(NamedTuple):
    sequence_id: SequenceId
    pages: tuple[GroupPages, ...]
    leave: tuple[SnapshotSlot, ...] = ()


class Publish(NamedTuple):
    sequence_id: SequenceId
    tokens: bytes
    computed_tokens: int


class Remap(NamedTuple):
    sequence_id: SequenceId
    pages: tuple[GroupPages, ...]


class Release(NamedTuple):
    """FINISHED says that every launch of the sequence is reported: its rolling snapshot stands at its last boundary."""

    sequence_id: SequenceId
    reason: ReleaseReason


class Ack(NamedTuple):
    ticket: TicketId
    num_done: int
    status: TransferStatus
    num_bytes: int = 0
    seconds: float = 0.0


class Rates(NamedTuple):
    prefill_tokens_per_s: float = 0.0
    fetch_bytes_per_s: float = 0.0


class Step(NamedTuple):
    """Everything that one engine iteration wants, applied in the order of the fields, or refused whole."""

    step_id: int
    acks: tuple[Ack, ...] = ()
    publishes: tuple[Publish, ...] = ()
    releases: tuple[Release, ...] = ()
    extends: tuple[Extend, ...] = ()
    acquires: tuple[Acquire, ...] = ()
    rates: Rates | None = None


class StepReply(NamedTuple):
    step_id: int
    grants: tuple[Grant, ...] = ()
    extends: tuple[ExtendGrant, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    remaps: tuple[Remap, ...] = ()


class Adopt(NamedTuple):
    sequence_id: SequenceId
    namespace: Namespace
    tokens: bytes
    computed_tokens: int
    tables: tuple[GroupPages, ...]
    working: tuple[SnapshotSlot, ...] = ()
    rolling: tuple[SnapshotSlot, ...] = ()
    priority: int = 0


class Segment(NamedTuple):
    first_token: int
    num_tokens: int
    residence: Residence
    miss_reason: MissReason = MissReason.NONE


class Explanation(NamedTuple):
    worker_id: WorkerId
    endpoint: str
    match: Match
    segments: tuple[Segment, ...]
    notes: tuple[str, ...]


class WorkerMatch(NamedTuple):
    worker_id: WorkerId
    endpoint: str
    match: Match


class Stored(NamedTuple):
    """Pages became findable. `parent_hash` is empty at the start of a prompt."""

    worker_id: WorkerId
    group: int
    namespace: Namespace
    parent_hash: bytes
    page_hashes: tuple[PageHash, ...]
    tokens: bytes


class Removed(NamedTuple):
    worker_id: WorkerId
    group: int
    page_hashes: tuple[PageHash, ...]


class Cleared(NamedTuple):
    worker_id: WorkerId | None


Event = Stored | Removed | Cleared
