"""The worker's session with the cache service: when to say Hello again, and what a Welcome changes.

Connecting is a task of its own. Launches of rows that have pages go on meanwhile: these pages are nobody else's until a
step is answered. Only while a Welcome is followed none is in flight. cache_client.py sends the Hello and repeats it;
what becomes of live sequences is decided in core/readmission.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from session.messages import Welcome
from worker_service.core.errors import SessionLost
from worker_service.core.ports import CachePort, Mover
from worker_service.core.readmission import Readmission
from worker_service.core.reply_handler import Failed
from worker_service.core.scheduler import Scheduler
from worker_service.session_retries import SessionRetries

_log = logging.getLogger(__name__)


class SessionKeeper:
    def __init__(
        self, scheduler: Scheduler, cache: CachePort, mover: Mover, stopping: asyncio.Event, wake: Callable[[], None]
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._mover = mover
        self._stopping = stopping
        self._wake = wake
        self._losses = SessionRetries()
        self._connecting: asyncio.Task[Welcome] | None = None
        # Why to connect again; None while the session is fine.
        self.hello_due: str | None = None
        # Of the present session; None while there is none.
        self.epoch: str | None = None
        # Whether every transfer of the session before has ended; until then its tickets pin pages.
        self.is_drained = False
        self._away_since_s = 0.0

    @property
    def is_open(self) -> bool:
        """Returns whether steps can be sent."""
        return self.epoch is not None and self.hello_due is None

    @property
    def is_welcomed(self) -> bool:
        """Returns whether a Welcome, or a refusal, waits to be followed."""
        return self._connecting is not None and self._connecting.done()

    def away_s(self) -> float:
        """Returns for how many seconds there has been no session; 0 while there is one, or a Welcome to follow."""
        is_away = self._connecting is not None and not self._connecting.done()
        return time.monotonic() - self._away_since_s if is_away else 0.0

    def ask_for_hello(self, reason: str) -> None:
        """Ends the session as soon as no reply is awaited."""
        self.hello_due = reason
        self._wake()

    def connect(self) -> None:
        """Ends the present session, if any, and begins the next one."""
        assert self._connecting is None, "one Hello at a time"
        self.epoch = None
        self.is_drained = False
        self._away_since_s = time.monotonic()
        self._connecting = asyncio.create_task(self._connect(), name="connect")
        self._connecting.add_done_callback(lambda _: self._wake())

    def follow(self) -> Readmission:
        """Follows the Welcome, while no launch is in flight. Raises SessionRefused, and SessionLost: connect again."""
        assert self._connecting is not None, "no Hello was sent"
        connecting, self._connecting = self._connecting, None
        welcome = connecting.result()
        readmission = self._scheduler.readmit(welcome)
        self.epoch = welcome.epoch
        _log.info("session with the cache service", extra={"epoch": welcome.epoch})
        return readmission

    def replied(self) -> None:
        """A step got its reply, so the session works."""
        self._losses.reset()

    def count(self, lost: SessionLost) -> tuple[Failed, ...]:
        """Counts a lost session. Returns the requests that fail with it. Raises StepsRejected when no step is taken."""
        return self._scheduler.reject_step() if self._losses.count(lost) else ()

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)

    async def _connect(self) -> Welcome:
        """Hello comes after every transfer has ended.

        A spill order that started after the mover was drained would read pages that the Welcome gives to others.
        """
        await self._cache.disconnect()
        await self._mover.drain()
        self.is_drained = True
        self._wake()
        await self._losses.pause(self._stopping)
        self.hello_due = None
        return await self._cache.connect(self._scheduler.generation)
