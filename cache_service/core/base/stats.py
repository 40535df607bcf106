"""What the manager counts, as values for people and metrics."""

from __future__ import annotations

from typing import NamedTuple

from cache_service.core.base.types import FetchPolicy, SpillPolicy
from session.messages import Rates
from session.words import GroupKind, MissReason, WorkerId


class GroupStats(NamedTuple):
    name: str
    kind: GroupKind
    num_pages: int
    num_free: int
    num_evictable: int
    num_evicted: int
    num_snapshots_taken: int = 0
    num_snapshots_restored: int = 0
    limited_tokens: int = 0


class WorkerStats(NamedTuple):
    """Token and request counts speak of admitted requests only."""

    worker_id: WorkerId
    endpoint: str
    incarnation: str
    model: str
    connected: bool
    groups: tuple[GroupStats, ...]
    num_leases: int
    num_tickets: int
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    fetched_tokens: int
    computed_tokens: int
    num_refusals: int
    num_nodes: int
    num_ghost_pages: int
    kept_bytes: int
    misses: tuple[tuple[MissReason, int], ...]
    pinned_tokens: int = 0
    matched_tokens: int = 0
    restored_pages: int = 0
    restored_tokens: int = 0
    rates: Rates = Rates()
    declined_tokens: int = 0
    fetches_paused: bool = False  # by failures of its own; for metrics


class HostTierStats(NamedTuple):
    num_rows: int
    num_bytes: int
    quota_bytes: int
    num_spilled_pages: int
    num_fetched_pages: int
    num_missing_pages: int
    num_corrupt_pages: int
    breaker_open: bool
    spill_policy: SpillPolicy
    fetch_policy: FetchPolicy


class AttachedEngine(NamedTuple):
    """Of one attachment, since its Attach call."""

    attachment: int
    engine: str
    model: str
    key_prefix: str
    num_leases: int
    num_tickets: int
    num_lookups: int
    asked_pages: int
    usable_pages: int
    fetched_pages: int
    reserved_pages: int
    refused_pages: int
    committed_pages: int
    given_up_pages: int
    misses: tuple[tuple[MissReason, int], ...]
    peer: str = ""
    oldest_ticket_ms: int = 0


class AttachmentStats(NamedTuple):
    """Of attached engines together. Pages are counted once, whatever their groups."""

    num_attachments: int = 0
    num_leases: int = 0
    num_tickets: int = 0
    num_lookups: int = 0
    asked_pages: int = 0
    usable_pages: int = 0
    reserved_pages: int = 0
    refused_pages: int = 0
    committed_pages: int = 0
    num_expired_leases: int = 0
    num_expired_tickets: int = 0
    misses: tuple[tuple[MissReason, int], ...] = ()
    fetched_pages: int = 0
    given_up_pages: int = 0
    engines: tuple[AttachedEngine, ...] = ()
    oldest_ticket_ms: int = 0


class ManagerStats(NamedTuple):
    epoch: str
    policy: str
    workers: tuple[WorkerStats, ...]
    host_tier: HostTierStats
    attachments: AttachmentStats = AttachmentStats()
    by_engine: tuple[tuple[str, AttachmentStats], ...] = ()  # for metrics


class ClearResult(NamedTuple):
    num_pages: int
    num_host_rows: int
    num_pinned_pages: int = 0
    num_hidden_rows: int = 0  # of unknown namespace: kept for others, hidden from the cleared one
    num_unconfirmed_workers: int = 0  # that have not confirmed that they forgot what was dropped
