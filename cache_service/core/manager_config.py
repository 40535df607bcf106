"""What can be set about the manager. Values and their limits only; where they come from is the shell's business."""

from __future__ import annotations

from dataclasses import dataclass

from cache_service.core.errors import InvalidInput
from cache_service.core.types import FetchPolicy, SpillPolicy

POLICIES = ("lru", "slru", "priority")


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """Every limit has a default, so that nothing in the manager grows without bound."""

    policy: str = "lru"
    spill: SpillPolicy = SpillPolicy.SELECTIVE
    fetch: FetchPolicy = FetchPolicy.AUTO
    host_quota_bytes: int = 8 << 30
    grace_ms: int = 10_000
    max_workers: int = 1024
    max_live_sequences: int = 4096
    max_prompt_tokens: int = 4_194_304
    max_open_tickets: int = 64
    transfer_pages: int = 64
    ghost_factor: int = 4
    write_back_low_water: float = 0.1
    breaker_failures: int = 3
    breaker_ms: int = 5_000
    watch: bool = False
    max_events: int = 65_536
    key_prefix: bytes = b"stemcache:1:"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidInput("policy", f"{self.policy!r} is not one of {', '.join(POLICIES)}")
        for name in (
            "max_workers",
            "max_live_sequences",
            "max_prompt_tokens",
            "transfer_pages",
            "breaker_failures",
            "max_events",
        ):
            if getattr(self, name) < 1:
                raise InvalidInput(name, "must be at least 1")
        for name in ("host_quota_bytes", "grace_ms", "max_open_tickets", "ghost_factor", "breaker_ms"):
            if getattr(self, name) < 0:
                raise InvalidInput(name, "must not be negative")
        if not 0.0 <= self.write_back_low_water <= 1.0:
            raise InvalidInput("write_back_low_water", "must be a fraction between 0 and 1")
