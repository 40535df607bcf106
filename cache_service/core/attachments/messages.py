"""Requests of attached engines and their results; the fields are explained in protos/v1/host_tier.proto."""

from __future__ import annotations

from typing import NamedTuple

from cache_service.core.base.fetch_estimate import FetchRates
from session.words import GroupSpec, MissReason, TransferStatus

# Pages of one Lookup or Reserve: 16,384 hashes take about 20 ms.
MAX_PATH_PAGES = 16_384
# Pages under all leases of one attachment, and pages that its open tickets write: a reference each.
MAX_HELD_PAGES = 262_144


class Attach(NamedTuple):
    """`groups` have pages of their own on no device here: their `num_pages` bounds a path. `peer`: who called."""

    engine: str
    fingerprint: bytes
    model: str
    page_tokens: int
    groups: tuple[GroupSpec, ...]
    num_ranks: int
    host_tier_id: str
    peer: str = ""


class TierLimits(NamedTuple):
    max_pages: int
    max_leases: int
    max_held_pages: int
    max_tickets: int
    lease_ms: int
    ticket_ms: int
    idle_ms: int
    ttl_ms: int


class Attached(NamedTuple):
    epoch: str
    attachment: int
    limits: TierLimits
    key_prefix: str


class AttachmentId(NamedTuple):
    """Names an attachment; the epoch tells it from one that had the same number before a restart of the service."""

    epoch: str
    number: int


class Path(NamedTuple):
    """Pages counted from 0: either ids of 32 bytes each, or tokens."""

    adapter: str = ""
    salt: str = ""
    page_ids: bytes = b""
    tokens: bytes = b""


class GroupRange(NamedTuple):
    """Pages first_page .. first_page + num_pages - 1 of a path."""

    group: int
    first_page: int
    num_pages: int


class TierPages(NamedTuple):
    """Pages of one group: their numbers in the path, and a hash for each."""

    group: int
    key_prefix: str
    pages: tuple[int, ...]
    page_hashes: tuple[bytes, ...]


class Lookup(NamedTuple):
    path: Path
    local_pages: int = 0
    lease: bool = True
    rates: FetchRates = FetchRates()


class ExplainedPath(NamedTuple):
    """What Explain is asked about attached engines.

    `attachment` 0: every one of the model. Without a path: the Lookup that an attachment keeps.
    """

    attachment: int
    model: str
    path: Path | None


class Found(NamedTuple):
    """`lease` is 0 where there is nothing to read, or none was asked for; `declined_pages` are computed sooner."""

    usable_pages: int
    matched_pages: int
    lease: int = 0
    pages: tuple[TierPages, ...] = ()
    limiting_group: str = ""
    miss_reason: MissReason = MissReason.UNSPECIFIED
    breaker_open: bool = False
    declined_pages: int = 0


class Reserve(NamedTuple):
    path: Path
    ranges: tuple[GroupRange, ...]


class Reserved(NamedTuple):
    """`ticket` is 0 where nothing is to be written."""

    ticket: int = 0
    pages: tuple[TierPages, ...] = ()
    num_refused: int = 0
    breaker_open: bool = False


class WrittenPages(NamedTuple):
    """The first `num_pages` of a group's pages in a ticket."""

    group: int
    num_pages: int
    num_bytes: int


class Commit(NamedTuple):
    ticket: int
    rank: int
    status: TransferStatus
    written: tuple[WrittenPages, ...] = ()


class Committed(NamedTuple):
    is_open: bool
    num_findable: int = 0


class LeaseEnd(NamedTuple):
    lease: int
    status: TransferStatus
    num_pages: int = 0
