"""What can be set about the manager. Values and their limits only; where they come from is the shell's business."""

from __future__ import annotations

from dataclasses import dataclass

from cache_service.core.base.types import FetchPolicy, SpillPolicy
from session.errors import InvalidInput
from session.limits import SessionLimits

# Those of one session come from the session's own limits.
SESSION = SessionLimits()


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """Every limit has a default, so that nothing in the manager grows without bound."""

    policy: str = "adaptive"
    spill: SpillPolicy = SpillPolicy.SELECTIVE
    fetch: FetchPolicy = FetchPolicy.AUTO
    host_quota_bytes: int = 8 << 30
    grace_ms: int = SESSION.grace_ms
    max_workers: int = 1024
    max_live_sequences: int = SESSION.max_live_sequences
    max_sequence_tokens: int = SESSION.max_sequence_tokens
    max_message_bytes: int = SESSION.max_message_bytes
    max_adopt_pages: int = SESSION.max_adopt_pages
    max_kept_bytes: int = SESSION.max_kept_bytes
    max_open_tickets: int = 64
    transfer_pages: int = 64
    ghost_factor: int = 4
    host_ttl_ms: int = 86_400_000  # life of a value in a shared store after its last use
    host_renew_ms: int = 21_600_000  # a row in use is renewed at most this often
    scans_host_tiers: bool = False  # whether shared tiers are scanned; spills to one wait for `HostTiers.end_scan`
    host_lease_ms: int = 60_000  # of an attached engine on host rows
    max_attachments: int = 256
    attachment_idle_ms: int = 600_000
    write_back_low_water: float = 0.1
    max_pinned_share: float = 0.5  # of a worker's pages, under Pin calls
    max_spill_ms: int = 120_000  # a spill that is not acknowledged by then is given up, a fetch is late
    max_lease_bytes: int = 256 << 20  # of tokens that one worker's leases hold
    max_total_lease_bytes: int = 1 << 30  # of tokens that all workers' leases hold together
    breaker_failures: int = 3
    breaker_ms: int = 5_000
    watch: bool = False  # whether events are made from the start; CacheManager.watch says it later
    max_events: int = 65_536

    def __post_init__(self) -> None:
        for name in (
            "max_workers",
            "max_live_sequences",
            "max_sequence_tokens",
            "max_message_bytes",
            "max_adopt_pages",
            "transfer_pages",
            "breaker_failures",
            "max_events",
            "max_spill_ms",
            "max_lease_bytes",
            "max_total_lease_bytes",
            "max_attachments",
            "host_lease_ms",
            "attachment_idle_ms",
        ):
            if getattr(self, name) < 1:
                raise InvalidInput(name, "must be at least 1")
        for name in (
            "host_quota_bytes",
            "max_kept_bytes",
            "grace_ms",
            "max_open_tickets",
            "ghost_factor",
            "breaker_ms",
        ):
            if getattr(self, name) < 0:
                raise InvalidInput(name, "must not be negative")
        for name in ("write_back_low_water", "max_pinned_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidInput(name, "must be a fraction between 0 and 1")
