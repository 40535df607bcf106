"""What the worker's core says to the world and hears from it: the session's words as values, the ports as Protocols.

Knows no protobuf, no Redis and no tensor. The words mirror protos/v1; packed fields are little-endian bytes: tokens
int32, page ids uint32 (0 = NO_PAGE, a hole).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from enum import IntEnum
from typing import NamedTuple, NewType, Protocol

SequenceId = NewType("SequenceId", int)
TicketId = NewType("TicketId", int)

NO_PAGE = 0


class GroupKind(IntEnum):
    FULL = 1
    WINDOW = 2
    STATE = 3


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
    model: str
    adapter: str = ""
    salt: str = ""


class GroupSpec(NamedTuple):
    """One pool of the worker; `num_pages` are usable ones, page 0 is reserved beyond them."""

    name: str
    kind: GroupKind
    num_pages: int
    page_bytes: int
    window_tokens: int = 0


class GroupPages(NamedTuple):
    group: int
    first_page: int
    page_ids: bytes


class SnapshotSlot(NamedTuple):
    group: int
    boundary_tokens: int
    slot: int


class TransferPages(NamedTuple):
    """A page id and a hash of 32 bytes for each page, packed; NO_PAGE where the group does not move that page."""

    group: int
    page_ids: bytes
    key_prefix: str
    page_hashes: bytes

    def key(self, page: int, rank: int) -> bytes:
        """The store's key of a page, counted from the transfer's first one."""
        return f"{self.key_prefix}{rank}:{self.page_hashes[32 * page : 32 * page + 32].hex()}".encode()


class Transfer(NamedTuple):
    """A run of pages to move between device and host tier; acks count from `first_page`."""

    ticket: TicketId
    groups: tuple[TransferPages, ...]
    first_page: int
    num_pages: int


class Match(NamedTuple):
    matched_tokens: int
    usable_tokens: int
    host_tokens: int
    limiting_group: str
    miss_reason: int


class Acquire(NamedTuple):
    """`tokens` are those after the first `kept_tokens`, kept by the cache service from an earlier acquire or lease."""

    sequence_id: SequenceId
    namespace: Namespace
    tokens: bytes
    reserve_pages: int
    chunk_tokens: int
    priority: int = 0
    kept_tokens: int = 0
    bypass_cache: bool = False


class Grant(NamedTuple):
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
    """`field` names the offending input when `reason` is INVALID."""

    sequence_id: SequenceId
    reason: RefusalReason
    detail: str
    field: str = ""


class Extend(NamedTuple):
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
    """`rolling_tokens`: the boundary whose state the rolling slots hold, whatever is still in flight; 0 is none."""

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
    prefill_tokens_per_s: float
    fetch_bytes_per_s: float


class Adopt(NamedTuple):
    """Take over the pages of a sequence that an earlier state of the cache service granted."""

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
    """Everything that one engine iteration wants, applied in this order: acks, publishes, releases, adopts, extends,
    acquires. An item that cannot be applied is refused alone."""

    step_id: int
    acks: tuple[Ack, ...] = ()
    publishes: tuple[Publish, ...] = ()
    releases: tuple[Release, ...] = ()
    adopts: tuple[Adopt, ...] = ()
    extends: tuple[Extend, ...] = ()
    acquires: tuple[Acquire, ...] = ()
    rates: Rates | None = None


class StepReply(NamedTuple):
    step_id: int
    grants: tuple[Grant, ...] = ()
    extends: tuple[ExtendGrant, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    remaps: tuple[Remap, ...] = ()


class SessionLimits(NamedTuple):
    """What the cache service takes from this worker; each is explained in protos/v1/cache.proto."""

    max_sequence_tokens: int
    max_live_sequences: int
    max_step_items: int
    max_message_bytes: int
    max_name_chars: int
    max_adopt_pages: int
    max_kept_bytes: int
    grace_ms: int


class Welcome(NamedTuple):
    """`epoch` and `generation` name a state of the cache service; `last_step_id` is the last step applied to it."""

    epoch: str
    generation: int
    last_step_id: int
    limits: SessionLimits
    capabilities: tuple[str, ...] = ()


class CachePort(Protocol):
    """The engine's view of the cache service. One unanswered Step at a time.

    A lost stream raises SessionLost from `step`, and once from `next_order`, so that an idle engine hears of it too.
    The engine then calls `hang_up`, drains the mover, calls `connect` and follows the Welcome.
    """

    async def connect(self, generation: int) -> Welcome:
        """Returns the Welcome to a Hello that names `generation`, the state to go on from; 0 begins anew.

        Raises SessionRefused when no cache service will take this worker.
        """
        ...

    async def step(self, step: Step) -> StepReply: ...

    async def next_order(self) -> Transfer:
        """Returns the next spill order of the present stream; waits for one."""
        ...

    async def hang_up(self) -> None:
        """End the stream. No order of it is handed out afterwards."""
        ...

    async def close(self) -> None:
        """Say Goodbye and end the stream."""
        ...


class SessionLost(Exception):
    """The stream to the cache service broke; the state on its other side is known again after `connect`."""


class StepRejected(SessionLost):
    """The stream ended over the content of a step or of its reply: the same step may end the next stream, too."""


class SessionRefused(Exception):
    """The cache service will not take this worker: another one has its name, or the two do not fit together."""


class Mover(Protocol):
    """Every transfer ends in exactly one ack, handed over in the event loop."""

    def fetch(self, transfer: Transfer, barrier: Callable[[], None]) -> None: ...

    def spill(self, transfer: Transfer) -> None: ...

    async def drain(self) -> None: ...

    async def close(self) -> None: ...


class HostTier(Protocol):
    """Values by key, beyond this process or in it. Called from the mover's threads, never from the event loop.

    Knows no page: values are framed by page_codec before they come here. Every failure is a HostTierError; an absent
    key is a None, never an error.
    """

    @property
    def kind(self) -> HostTierKind: ...

    def identity(self) -> str:
        """The sentinel's value, made on first use; it changes when the store was flushed."""
        ...

    def put(self, keys: Seq[bytes], values: Seq[Seq[bytes | memoryview]]) -> int:
        """Store each value, given as parts; returns how many leading ones are acknowledged (fewer in a full store)."""
        ...

    def get(self, keys: Seq[bytes], max_bytes: int) -> list[bytearray | None]:
        """The values in order, None for absent keys; a value longer than `max_bytes` counts as absent."""
        ...

    def close(self) -> None: ...


class HostTierError(Exception):
    """The host tier did not answer in time, answered nonsense, or refused the connection."""
