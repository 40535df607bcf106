"""The one step that is under way to the cache service: launches go on while its reply is awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from session.messages import Step, StepReply
from worker_service.core.ports import CachePort

# A reply that takes longer than this does not hold back the next launch, which then has the rows that are there.
LATE_S = 0.003


class Exchanged(NamedTuple):
    reply: StepReply
    step_id: int
    start_s: float
    end_s: float


class StepExchange:
    def __init__(self, cache: CachePort, on_reply: Callable[[], None]) -> None:
        self._cache = cache
        self._on_reply = on_reply
        self._task: asyncio.Task[Exchanged] | None = None
        self._start_s = 0.0
        self._dropped: set[asyncio.Task[Exchanged]] = set()

    @property
    def is_open(self) -> bool:
        return self._task is not None

    def send(self, step: Step) -> None:
        assert self._task is None, "one unanswered step at a time"
        self._start_s = time.monotonic()
        self._task = asyncio.create_task(self._send(step), name="step")
        self._task.add_done_callback(lambda _: self._on_reply())

    def take(self) -> Exchanged | None:
        """Returns the reply once, when it is there. Raises SessionLost when it never comes."""
        if self._task is None or not self._task.done():
            return None
        task, self._task = self._task, None
        return task.result()

    async def settled(self) -> None:
        """Waits for the reply, or its loss."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def time_to_late_s(self) -> float | None:
        """Returns the seconds until the reply is late, 0 when it is; None when none is awaited."""
        return max(self._start_s + LATE_S - time.monotonic(), 0.0) if self._task is not None else None

    def waiting_s(self) -> float:
        """Returns for how many seconds a reply has been awaited; 0 when none is."""
        return time.monotonic() - self._start_s if self._task is not None and not self._task.done() else 0.0

    def drop(self) -> None:
        """Awaits no reply any more; one that comes is not taken."""
        if self._task is not None:
            self._dropped.add(self._task)
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        self.drop()
        await asyncio.gather(*self._dropped, return_exceptions=True)

    async def _send(self, step: Step) -> Exchanged:
        reply = await self._cache.step(step)
        return Exchanged(reply, step.step_id, self._start_s, time.monotonic())
