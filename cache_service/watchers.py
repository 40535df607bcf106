"""Sends the manager's events to every watcher, to each at its own pace.

A watcher that falls behind loses its queue and is told how much it lost; one that reads nothing at all is cut off, so
that its place is free again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import aclosing
from typing import NamedTuple, Protocol

from cache_service import codec
from cache_service.core.base.types import Event
from cache_service.slices import SLICE_S
from protos.v1 import cache_pb2
from session.errors import FieldError, TooMany

PresentState = Generator[tuple[Event, ...], None, int]
# Messages of what is cached now that wait for one watcher: up to 100 KB each.
MAX_SLICE = 32


def _nothing() -> PresentState:
    yield from ()
    return 0


class WatchIsOff(FieldError):
    """This service was told to make no events."""


class WatcherTooSlow(FieldError):
    """The watcher took no message for too long."""


class WatchLimits(NamedTuple):
    """`max_queued` messages of one watcher, of `max_queued_bytes` together; see `Watchers.serve` for the timeout.

    `max_present_states`: of watchers that are being told what is cached now.
    """

    max_watchers: int = 64
    max_queued: int = 4096
    max_queued_bytes: int = 16 << 20
    write_timeout_s: float = 30.0
    max_present_states: int = 2


class Stream(Protocol):
    """The stream to which a watcher's messages are written; a write waits while the peer reads nothing."""

    async def write(self, message: cache_pb2.WatchResponse) -> None: ...


class Watchers:
    """Numbers events and hands them to bounded queues. `tell_watched` is told whether there is a watcher."""

    def __init__(
        self,
        epoch: str,
        limits: WatchLimits,
        tell_watched: Callable[[bool], None] = lambda is_watched: None,
        present_state: Callable[[], PresentState] = _nothing,
    ) -> None:
        self._epoch = epoch
        self._limits = limits
        self._tell_watched = tell_watched
        self._present_state = present_state
        self._num_present_states = 0
        self._seq = 0
        # A dict for its order: watchers are told in the order in which they came.
        self._watchers: dict[_Watcher, None] = {}

    def __len__(self) -> int:
        return len(self._watchers)

    @property
    def seq(self) -> int:
        """Returns the number of the latest event."""
        return self._seq

    def tell(self, events: Iterable[Event]) -> None:
        for event in events:
            self._seq += 1
            if self._watchers:
                message = codec.encode_event(event, self._epoch, self._seq)
                num_bytes = message.ByteSize()
                for watcher in self._watchers:
                    watcher.put(message, num_bytes)

    def lose(self, num_events: int) -> None:
        """Counts events that were dropped before they could be sent; the next one comes after them."""
        self._seq += num_events
        for watcher in self._watchers:
            watcher.lose(num_events, self._seq)

    async def serve(self, stream: Stream, *, present_state: bool = False) -> None:
        """Writes every event from now on. Raises WatcherTooSlow when the peer takes no message in time."""
        async with aclosing(self.watch(present_state=present_state)) as messages:
            async for message in messages:
                try:
                    async with asyncio.timeout(self._limits.write_timeout_s):
                        await stream.write(message)
                except TimeoutError:
                    reason = f"took no message for {self._limits.write_timeout_s:g} s"
                    raise WatcherTooSlow("watch", reason) from None

    async def watch(self, *, present_state: bool = False) -> AsyncGenerator[cache_pb2.WatchResponse, None]:
        """Every event from now on, between those that tell what is cached now, where these are wanted.

        The first message has none: it says the number of the latest event.
        """
        if not self._limits.max_watchers:
            raise WatchIsOff("watch", "is off in this service's settings")
        if len(self._watchers) >= self._limits.max_watchers:
            raise TooMany("watch", f"there are {self._limits.max_watchers} watchers already")
        if present_state and self._num_present_states >= self._limits.max_present_states:
            raise TooMany("watch.present_state", f"{self._num_present_states} watchers are being told it already")
        # Counted before the first message is written: that may take long, and others may ask in between.
        self._num_present_states += present_state
        watcher = _Watcher(self._epoch, self._limits)
        self._watchers[watcher] = None
        self._tell_watched(True)
        try:
            yield cache_pb2.WatchResponse(epoch=self._epoch, seq=self._seq)
            if present_state:
                async with aclosing(self._tell_present_state(watcher)) as told:
                    async for present in told:
                        yield present
                self._num_present_states -= 1
                present_state = False
            while (message := await watcher.next()) is not None:
                yield message
        finally:
            self._num_present_states -= present_state
            self._leave(watcher)

    async def _tell_present_state(self, watcher: _Watcher) -> AsyncGenerator[cache_pb2.WatchResponse, None]:
        """Tells the present state through the queue, so that events keep their order; a slice when it is empty.

        Ends early after a loss: the watcher has to ask anew then.
        """
        slices = self._present_state()
        try:
            is_over = False
            while not (is_over or watcher.num_losses or watcher.is_ended):
                is_over = self._queue_slice(watcher, slices)
                while (message := watcher.next_now()) is not None:
                    yield message
                await asyncio.sleep(0)
        finally:
            slices.close()

    def _queue_slice(self, watcher: _Watcher, slices: PresentState) -> bool:
        """Queues messages for SLICE_S at most, and few of them. Returns whether these were the last ones."""
        end_s = time.perf_counter() + SLICE_S
        for _ in range(MAX_SLICE):
            try:
                events = next(slices)
            except StopIteration as end:
                watcher.append(codec.encode_present_state_end(end.value, self._epoch, self._seq))
                return True
            for event in events:
                watcher.append(codec.encode_event(event, self._epoch, self._seq))
            if time.perf_counter() > end_s:
                break
        return False

    def _leave(self, watcher: _Watcher) -> None:
        del self._watchers[watcher]
        if not self._watchers:
            self._tell_watched(False)
            # Nothing makes events while no watcher is there; the number left out shows the gap to one that comes back.
            self._seq += 1

    def close(self) -> None:
        """Ends every watch after what is queued for it."""
        for watcher in self._watchers:
            watcher.end()


class _Watcher:
    """One watcher's queue."""

    def __init__(self, epoch: str, limits: WatchLimits) -> None:
        self._epoch = epoch
        self._limits = limits
        # Messages, their bytes, and 1 for an event, 0 for what was cached before.
        self._queue: deque[tuple[cache_pb2.WatchResponse, int, int]] = deque()
        self._num_bytes = self._num_events = 0
        self.num_losses = 0
        self._num_lost = 0
        self._last_lost = 0
        self.is_ended = False
        self._wake = asyncio.Event()

    def put(self, message: cache_pb2.WatchResponse, num_bytes: int) -> None:
        limits = self._limits
        if self._num_events >= limits.max_queued or self._num_bytes + num_bytes > limits.max_queued_bytes:
            self.lose(1, message.seq)
            return
        self._queue.append((message, num_bytes, 1))
        self._num_bytes += num_bytes
        self._num_events += 1
        self._wake.set()

    def append(self, message: cache_pb2.WatchResponse) -> None:
        """Queues a message that is not an event. The queue's limits do not count it: `_queue_slice` bounds these."""
        self._queue.append((message, 0, 0))

    def lose(self, num_events: int, last_seq: int) -> None:
        """A watcher with a gap must ask for the state anew, so what is queued before the gap is dropped."""
        self._num_lost += self._num_events + num_events
        self.num_losses += 1
        self._last_lost = last_seq
        self._queue.clear()
        self._num_bytes = self._num_events = 0
        self._wake.set()

    def end(self) -> None:
        self.is_ended = True
        self._wake.set()

    def next_now(self) -> cache_pb2.WatchResponse | None:
        """Returns what is due; None while that is nothing."""
        if self._num_lost:
            lost = codec.encode_events_lost(self._num_lost, self._epoch, self._last_lost)
            self._num_lost = 0
            return lost
        if not self._queue:
            return None
        message, num_bytes, is_event = self._queue.popleft()
        self._num_bytes -= num_bytes
        self._num_events -= is_event
        return message

    async def next(self) -> cache_pb2.WatchResponse | None:
        """Returns what is due next; None after the end."""
        while (message := self.next_now()) is None:
            if self.is_ended:
                return None
            self._wake.clear()
            await self._wake.wait()
        return message
