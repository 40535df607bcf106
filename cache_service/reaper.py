"""Calls the manager's tick: grace periods, pins, write-back spills, the breaker.

Its effects are dispatched after each tick.
"""

from __future__ import annotations

import asyncio
import logging
import time

from cache_service.worker_streams import Sessions

_log = logging.getLogger("cache_service.reaper")


def monotonic_ms() -> int:
    """Returns the clock of every `now_ms`: it never goes back, and means nothing outside of this process."""
    return time.monotonic_ns() // 1_000_000


class Reaper:
    def __init__(self, sessions: Sessions, tick_s: float) -> None:
        self._sessions = sessions
        self._tick_s = tick_s

    def tick(self) -> None:
        self._sessions.manager.tick(self._sessions.clock())
        self._sessions.dispatcher.flush()
        self._sessions.wake()

    async def run(self) -> None:
        """Ticks until cancelled. A tick that fails is logged, and time goes on: without it no lease would ever end."""
        while True:
            await asyncio.sleep(self._tick_s)
            self._sessions.end_stalled()
            try:
                self.tick()
            except Exception:
                _log.exception("a tick failed")
