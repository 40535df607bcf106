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
    CLEARED = 8
    BYPASSED = 9


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
    """`generation`: Welcome's number of the state that the worker goes on from; 0 begins a new one."""

    worker_id: WorkerId
    endpoint: str
    incarnation: str
    fingerprint: bytes
    page_tokens: int
    groups: tuple[GroupSpec, ...]
    host_tier: HostTierKind = HostTierKind.NONE
    host_tier_id: str = ""
    num_ranks: int = 1
    model: str = ""  # of every namespace that the worker names; empty: of any
    generation: int = 0


class SessionLimits(NamedTuple):
    """What the service takes from one worker, as Welcome tells it."""

    max_sequence_tokens: int = 1_048_576
    max_live_sequences: int = 4_096
    max_step_items: int = 8_192
    max_message_bytes: int = 64 << 20
    max_name_chars: int = 256
    max_adopt_pages: int = 2_048
    max_kept_bytes: int = 32 << 20
    grace_ms: int = 10_000


class Welcome(NamedTuple):
    """`generation` is Hello's where the worker may go on; any other number names a state that holds nothing yet."""

    epoch: str
    generation: int
    last_step_id: int
    limits: SessionLimits


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
    """A page id and a hash for each page of the transfer, packed; NO_PAGE where the group does not move that page.

    The store's key of a page is `key_prefix`, the rank in decimal, ":", the page's hash in hex.
    """

    group: int
    page_ids: bytes
    key_prefix: str
    page_hashes: bytes


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
    kept_tokens: int = 0  # leading tokens that `tokens` leaves out, since the service kept them
    bypass_cache: bool = False


class Grant(NamedTuple):
    """A sequence may run on these pages; while there are `fetches` it waits for the acks of all of them instead."""

    sequence_id: SequenceId
    usable_tokens: int
    cached_tokens: int
    fetched_tokens: int
    tables: tuple[GroupPages, ...]
    match: Match
    fetches: tuple[Transfer, ...] = ()
    restore: tuple[SnapshotSlot, ...] = ()
    leave: tuple[SnapshotSlot, ...] = ()
    working: tuple[SnapshotSlot, ...] = ()
    rolling: tuple[SnapshotSlot, ...] = ()


class Refusal(NamedTuple):
    """The item was not applied; nothing changed. `field` is for INVALID only."""

    sequence_id: SequenceId
    reason: RefusalReason
    detail: str
    field: str = ""


class BadItem(NamedTuple):
    """An item of a Step that is malformed. `field` is named from the item on, as "namespace.salt"."""

    sequence_id: SequenceId
    field: str
    reason: str


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
    """FINISHED may say which boundary's state the rolling slots hold, whatever is in flight; 0: none."""

    sequence_id: SequenceId
    reason: ReleaseReason
    rolling_tokens: int = 0


class Ack(NamedTuple):
    ticket: TicketId
    num_done: int
    status: TransferStatus
    num_bytes: int = 0
    seconds: float = 0.0


class Rates(NamedTuple):
    prefill_tokens_per_s: float = 0.0
    fetch_bytes_per_s: float = 0.0


class Adopt(NamedTuple):
    sequence_id: SequenceId
    namespace: Namespace
    tokens: bytes
    computed_tokens: int
    tables: tuple[GroupPages, ...]
    working: tuple[SnapshotSlot, ...] = ()
    rolling: tuple[SnapshotSlot, ...] = ()
    priority: int = 0
    bypass_cache: bool = False


class Step(NamedTuple):
    """Everything that one engine iteration wants, applied in the order of the fields; a bad item is refused alone."""

    step_id: int
    acks: tuple[Ack, ...] = ()
    publishes: tuple[Publish | BadItem, ...] = ()
    releases: tuple[Release | BadItem, ...] = ()
    adopts: tuple[Adopt | BadItem, ...] = ()
    extends: tuple[Extend, ...] = ()
    acquires: tuple[Acquire | BadItem, ...] = ()
    rates: Rates | None = None


class StepReply(NamedTuple):
    step_id: int
    grants: tuple[Grant, ...] = ()
    extends: tuple[ExtendGrant, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    remaps: tuple[Remap, ...] = ()


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
    pinned_tokens: int = 0
    pin_left_ms: int = 0


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
