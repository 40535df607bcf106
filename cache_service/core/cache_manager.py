"""The verbs over all workers: hello, step, adopt, goodbye, match, explain, pin, clear, tick.

Knows no clock, no transport and no thread: time comes in as `now_ms`, orders, events and host deletes are taken out.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_service.core.manager_config import ManagerConfig
from cache_service.core.stats import ClearResult, ManagerStats
from cache_service.core.types import (
    Acquire,
    Adopt,
    Event,
    Explanation,
    Extend,
    ExtendGrant,
    Grant,
    Hello,
    Namespace,
    Publish,
    Refusal,
    Release,
    Remap,
    Step,
    StepReply,
    Transfer,
    Welcome,
    WorkerId,
    WorkerMatch,
)

__all__ = ["CacheManager", "ManagerConfig"]


class CacheManager:
    """Signatures first; bodies follow."""

    def __init__(self, config: ManagerConfig, epoch: str) -> None: ...

    def hello(self, hello: Hello, now_ms: int) -> Welcome:
        raise NotImplementedError

    def step(self, worker_id: WorkerId, step: Step, now_ms: int) -> StepReply:
        raise NotImplementedError

    def adopt(self, worker_id: WorkerId, adopt: Adopt, now_ms: int) -> Grant | Refusal:
        raise NotImplementedError

    def disconnect(self, worker_id: WorkerId, incarnation: str, now_ms: int) -> None: ...

    def goodbye(self, worker_id: WorkerId, now_ms: int) -> None: ...

    # One verb at a time, for replays and tests; each validates, then applies.
    def acquire(self, worker_id: WorkerId, acquire: Acquire, now_ms: int) -> Grant | Refusal:
        raise NotImplementedError

    def extend(self, worker_id: WorkerId, extend: Extend, now_ms: int) -> ExtendGrant | Refusal:
        raise NotImplementedError

    def publish(self, worker_id: WorkerId, publish: Publish, now_ms: int) -> Remap | None:
        raise NotImplementedError

    def release(self, worker_id: WorkerId, release: Release, now_ms: int) -> None: ...

    def match(self, namespace: Namespace, tokens: bytes, worker_id: WorkerId | None = None) -> tuple[WorkerMatch, ...]:
        raise NotImplementedError

    def explain(
        self, namespace: Namespace, tokens: bytes, worker_id: WorkerId | None = None
    ) -> tuple[Explanation, ...]:
        raise NotImplementedError

    def pin(self, namespace: Namespace, tokens: bytes, ttl_ms: int, now_ms: int) -> int:
        raise NotImplementedError

    def clear(self, namespace: Namespace | None, unused_only: bool, now_ms: int) -> ClearResult:
        raise NotImplementedError

    def stats(self) -> ManagerStats:
        raise NotImplementedError

    def tick(self, now_ms: int) -> None: ...

    def take_orders(self, worker_id: WorkerId) -> tuple[Transfer, ...]:
        raise NotImplementedError

    def take_events(self) -> tuple[Event, ...]:
        raise NotImplementedError

    def take_host_deletes(self) -> tuple[bytes, ...]:
        raise NotImplementedError

    def take_host_touches(self) -> tuple[bytes, ...]:
        """Keys whose time to live is to be refreshed, tails before heads."""
        raise NotImplementedError

    # `host_tier_id` is Hello.host_tier_id of a SHARED tier.
    def host_adopted(self, host_tier_id: str, fingerprint: bytes, keys: Sequence[bytes], now_ms: int) -> int:
        """Rows found by a background scan after a restart; answers how many became findable."""
        raise NotImplementedError

    def host_lost(self, host_tier_id: str, now_ms: int) -> None:
        """The store was flushed or replaced: drop its index at once."""

    def report_host_failure(self, host_tier_id: str, now_ms: int) -> None: ...

    def report_host_ok(self, host_tier_id: str, now_ms: int) -> None: ...

    def host_tiers(self) -> tuple[tuple[str, bytes], ...]:
        """(host_tier_id, fingerprint) of every SHARED tier that a worker named: what to scan and watch."""
        raise NotImplementedError
