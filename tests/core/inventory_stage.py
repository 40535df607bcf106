"""A manager with one worker that brings an inventory, and the runs that it brings."""

from __future__ import annotations

from typing import Any

from cache_service.core.cache_manager import CacheManager, ManagerConfig
from session.messages import Acquire, BadRun, CachedRun, Grant, Hello, Inventory, RunRefusal, Step, StepReply
from session.protocol import CAPABILITIES
from session.words import GroupSpec, Namespace, SequenceId, WorkerId
from tests.core import audit
from tests.core.world import NS, full, pack

WORKER = WorkerId("w")
PAGE = 2
TENANT = Namespace("model", salt="tenant")


class Stage:
    """A manager with one worker, audited after each step."""

    def __init__(self, *groups: GroupSpec, **config: Any) -> None:
        self.manager = CacheManager(ManagerConfig(**config), "epoch")
        self.hello = Hello(
            WORKER, "h:1", "first", b"f" * 32, PAGE, groups or (full(20),), model="model", capabilities=CAPABILITIES
        )
        self.manager.hello(self.hello, 0)
        self.last = 0

    def go_away(self) -> None:
        """For longer than the grace period."""
        self.manager.disconnect(WORKER, self.hello.incarnation, self.last)
        self.manager.tick(self.last + self.manager.config.grace_ms)
        assert not self.manager.workers

    def come_back(self) -> None:
        self.manager.hello(self.hello, self.last)
        self.last = 0

    def step(self, **items: Any) -> StepReply:
        self.last += 1
        reply = self.manager.step(WORKER, Step(self.last, **items), self.last)
        audit.check(self.manager)
        return reply

    def offer(self, *runs: CachedRun | BadRun, is_complete: bool = False) -> tuple[RunRefusal, ...]:
        return self.step(inventory=Inventory(runs, is_complete)).run_refusals

    def acquire(self, number: int, tokens: list[int], namespace: Namespace = NS) -> Grant:
        (grant,) = self.step(acquires=(Acquire(SequenceId(number), namespace, pack(tokens)),)).grants
        return grant

    def cached(self, tokens: list[int], namespace: Namespace = NS) -> int:
        (found,) = self.manager.match(namespace, pack([*tokens, 99]))
        return found.match.usable_tokens

    @property
    def restored(self) -> int:
        return self.manager.stats().workers[0].restored_tokens


def run(number: int, tokens: list[int], *page_ids: list[int], parent: int = 0, namespace: Namespace = NS) -> CachedRun:
    return CachedRun(number, parent, None if parent else namespace, pack(tokens), tuple(pack(row) for row in page_ids))


TRUNK = run(1, [1, 2, 3, 4], [7, 5])
LEFT = run(2, [5, 6], [3], parent=1)
RIGHT = run(3, [8, 9, 8, 9], [11, 12], parent=1)
