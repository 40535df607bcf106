"""Words that only the manager uses: what people ask it and are told, events, and the host tier's policies.

Values only. What workers and the cache service say to each other is in `session`.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

from session.words import GroupKind, Match, MissReason, Namespace, PageHash, SequenceId, WorkerId


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


class Age(NamedTuple):
    """How long ago: at least and at most."""

    least_ms: int
    most_ms: int


class Segment(NamedTuple):
    """`last_used` is of pages on the device (0, 0 while they are held), `gone` of evicted and cleared ones."""

    first_token: int
    num_tokens: int
    residence: Residence
    miss_reason: MissReason = MissReason.NONE
    last_used: Age | None = None
    gone: Age | None = None


class Holder(NamedTuple):
    """A running sequence that holds leading tokens of a prompt."""

    sequence_id: SequenceId
    num_tokens: int


class Explanation(NamedTuple):
    """`holders` are the `num_holders` sequences that hold pages of the prompt, the largest first and bounded."""

    worker_id: WorkerId
    endpoint: str
    match: Match
    segments: tuple[Segment, ...]
    notes: tuple[str, ...]
    pinned_tokens: int = 0
    pin_left_ms: int = 0
    holders: tuple[Holder, ...] = ()
    num_holders: int = 0
    spilling_tokens: int = 0


class TierGroupExplanation(NamedTuple):
    """One group of an attached engine; see protos/v1/cache.proto."""

    name: str
    kind: GroupKind
    leading_pages: int
    resident_pages: int
    usable_pages: int
    missing_page: int | None
    miss_reason: MissReason
    writing_pages: int
    replicated: bool = False


class AttachmentExplanation(NamedTuple):
    """How far an attached engine could resume a path now, and why no further; see protos/v1/cache.proto."""

    attachment: int
    engine: str
    num_pages: int
    page_tokens: int
    local_pages: int
    matched_pages: int
    usable_pages: int
    usable_tokens: int
    declined_pages: int
    limiting_group: str
    miss_reason: MissReason
    groups: tuple[TierGroupExplanation, ...]
    notes: tuple[str, ...]
    lookup_age_ms: int | None


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


class Connection(NamedTuple):
    """A worker's stream began or ended. After an end its pages cannot be used until it is back."""

    worker_id: WorkerId
    endpoint: str
    is_connected: bool


Event = Stored | Removed | Cleared | Connection
