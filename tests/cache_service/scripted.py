"""A manager that does what a test says: it keeps the calls it got, and answers or raises from its script.

For what the real manager does not do on demand: orders out of the blue, failures, silence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from typing import Any

from cache_service.core.base.stats import ClearResult, HostTierStats, ManagerStats
from cache_service.core.base.types import FetchPolicy, SpillPolicy
from session.limits import SessionLimits
from session.messages import StepReply, Welcome
from session.words import Transfer, TransferPages

HOST = HostTierStats(0, 0, 0, 0, 0, 0, 0, False, SpillPolicy.SELECTIVE, FetchPolicy.AUTO)


class ScriptedManager:
    def __init__(self, epoch: str = "scripted") -> None:
        self.tiers = self  # it has no rows
        self.epoch = epoch
        self.limits = SessionLimits()
        self.calls: list[tuple[Any, ...]] = []
        self.orders: dict[str, list[Transfer]] = defaultdict(list)
        self.events: list[Any] = []
        self.raises: Exception | None = None

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if self.raises is not None:
            raise self.raises

    def verbs(self) -> list[str]:
        return [call[0] for call in self.calls if call[0] != "tick"]

    def hello(self, hello: Any, now_ms: int) -> Welcome:
        self._called("hello", hello.worker_id, hello.incarnation)
        return Welcome(self.epoch, 1, 0, self.limits)

    def step(self, worker_id: str, step: Any, now_ms: int) -> StepReply:
        self._called("step", worker_id, step.step_id)
        return StepReply(step.step_id)

    def disconnect(self, worker_id: str, incarnation: str, now_ms: int) -> None:
        self.calls.append(("disconnect", worker_id, incarnation))

    def goodbye(self, worker_id: str) -> None:
        self.calls.append(("goodbye", worker_id))

    def tick(self, now_ms: int) -> None:
        self._called("tick")

    def clearing(self, namespace: Any, unused_only: bool, dry_run: bool = False) -> Generator[None, None, ClearResult]:
        self._called("clear", namespace, unused_only)
        yield
        return ClearResult(3, 4)

    def stats(self) -> ManagerStats:
        return ManagerStats(self.epoch, "lru", (), HOST)

    def take_orders(self, worker_id: str) -> tuple[Transfer, ...]:
        return tuple(self.orders.pop(worker_id, ()))

    def watch(self, is_watched: bool) -> None:
        pass

    def present_state(self) -> Generator[tuple[Any, ...], None, int]:
        yield ()
        return 0

    def has_effects(self) -> bool:
        return True

    def take_events(self) -> tuple[Any, ...]:
        events, self.events = tuple(self.events), []
        return events

    def take_num_lost_events(self) -> int:
        return 0

    def take_deletes(self) -> tuple[bytes, ...]:
        return ()

    def take_touches(self) -> tuple[bytes, ...]:
        return ()


def order(ticket: int, key_prefix: str = "k") -> Transfer:
    pages = TransferPages(0, b"\1\0\0\0", key_prefix, bytes(32))
    return Transfer(ticket, (pages,), 0, 1)  # type: ignore[arg-type]
