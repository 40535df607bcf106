"""Tells the manager's events to everybody who watches, each at its own pace.

Knows no manager and no stream. A watcher that falls behind loses its queue and is told how much it lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable

from cache_service.codec import encode
from cache_service.core.errors import CacheError, TooMany
from cache_service.core.types import Event
from protos.v1 import cache_pb2


class WatchIsOff(CacheError):
    """This service was told to make no events."""


class Watchers:
    """Numbers events and hands them to bounded queues."""

    def __init__(self, epoch: str, max_watchers: int, max_queued: int) -> None:
        self._epoch = epoch
        self._max_watchers = max_watchers
        self._max_queued = max_queued
        self._seq = 0
        # A dict for its order: watchers are told in the order in which they came.
        self._watchers: dict[_Watcher, None] = {}

    def __len__(self) -> int:
        return len(self._watchers)

    @property
    def seq(self) -> int:
        """The number of the latest event."""
        return self._seq

    def tell(self, events: Iterable[Event]) -> None:
        for event in events:
            self._seq += 1
            if self._watchers:
                message = encode.event(event, self._epoch, self._seq)
                for watcher in self._watchers:
                    watcher.put(message)

    def lose(self, num_events: int) -> None:
        """So many events will never be told; they came before the next one."""
        self._seq += num_events
        for watcher in self._watchers:
            watcher.lose(num_events, self._seq)

    async def watch(self) -> AsyncGenerator[cache_pb2.WatchResponse, None]:
        """Every event from now on. The first message has none: it says where the numbering stands."""
        if not self._max_watchers:
            raise WatchIsOff("watch", "is off in this service's settings")
        if len(self._watchers) >= self._max_watchers:
            raise TooMany("watch", f"there are {self._max_watchers} watchers already")
        watcher = _Watcher(self._epoch, self._max_queued)
        self._watchers[watcher] = None
        try:
            yield cache_pb2.WatchResponse(epoch=self._epoch, seq=self._seq)
            while (message := await watcher.next()) is not None:
                yield message
        finally:
            self._watchers.pop(watcher, None)

    def close(self) -> None:
        """Ends every watch after what is queued for it."""
        for watcher in self._watchers:
            watcher.end()


class _Watcher:
    """One watcher's queue."""

    def __init__(self, epoch: str, max_queued: int) -> None:
        self._epoch = epoch
        self._max_queued = max_queued
        self._queue: deque[cache_pb2.WatchResponse] = deque()
        self._num_lost = 0
        self._last_lost = 0
        self._ended = False
        self._wake = asyncio.Event()

    def put(self, message: cache_pb2.WatchResponse) -> None:
        if len(self._queue) >= self._max_queued:
            self.lose(1, message.seq)
            return
        self._queue.append(message)
        self._wake.set()

    def lose(self, num_events: int, last_seq: int) -> None:
        """A watcher with a gap must ask for the state anew, so what is queued before the gap is of no use."""
        self._num_lost += len(self._queue) + num_events
        self._last_lost = last_seq
        self._queue.clear()
        self._wake.set()

    def end(self) -> None:
        self._ended = True
        self._wake.set()

    async def next(self) -> cache_pb2.WatchResponse | None:
        while True:
            if self._num_lost:
                lost = encode.events_lost(self._num_lost, self._epoch, self._last_lost)
                self._num_lost = 0
                return lost
            if self._queue:
                return self._queue.popleft()
            if self._ended:
                return None
            self._wake.clear()
            await self._wake.wait()
