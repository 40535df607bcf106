"""Deletes and touches of the shared host tier's keys that wait to be sent to the store, and are sent in batches.

Both may be repeated without harm, so what failed is sent again. Touches keep their order: a key that is touched later
also ends later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from cache_service.clear_marks import FAILURES

# How far apart two touched keys end, in one batch and in two: more than a scan's reading of their ends varies by.
TOUCH_GAP_MS = 4
BATCH_GAP_MS = 100

log = logging.getLogger(__name__)


class ChangeLimits(NamedTuple):
    ttl_ms: int
    max_queued_keys: int
    keys_per_command: int
    retry_pause_s: float


class KeyChanges:
    """`delete` and `touch` only queue. The client is redis-py's, whose reply types differ between its releases."""

    def __init__(self, client: Any, limits: ChangeLimits, clock: Callable[[], int]) -> None:
        self._client = client
        self._limits = limits
        self._clock = clock
        self._work_waits = asyncio.Event()
        self._last_end_ms = 0
        self.deletes: deque[bytes] = deque()
        self.touches: deque[bytes] = deque()
        self.num_dropped = 0
        """Keys that found the queue full: they end by their time to live."""

    def delete(self, keys: Sequence[bytes]) -> None:
        self._queue(self.deletes, keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Queues keys whose time to live is to be refreshed, in this order."""
        self._queue(self.touches, keys)

    def follow(self, life_ms: int) -> None:
        """Makes keys that are touched from now on expire after a key whose time to live is `life_ms`."""
        self._last_end_ms = max(self._last_end_ms, self._clock() + life_ms)

    @property
    def has_room(self) -> bool:
        """Returns whether half of the queue is free, so that thousands of keys can be queued without loss."""
        return max(len(self.deletes), len(self.touches)) <= self._limits.max_queued_keys // 2

    def _queue(self, queue: deque[bytes], keys: Sequence[bytes]) -> None:
        room = self._limits.max_queued_keys - len(queue)
        queue.extend(islice(keys, max(0, room)))
        self.num_dropped += max(0, len(keys) - room)
        self._work_waits.set()

    async def send(self) -> None:
        """Waits until something is queued, and sends all of it."""
        await self._work_waits.wait()
        while self.deletes or self.touches:
            if not await self._send_batch():
                await asyncio.sleep(self._limits.retry_pause_s)
        self._work_waits.clear()

    async def _send_batch(self) -> bool:
        """Sends one batch of each kind. Returns False, and leaves both queued, where the store fails."""
        size = self._limits.keys_per_command
        deletes, touches = list(islice(self.deletes, size)), list(islice(self.touches, size))
        now_ms = self._clock()
        try:
            async with self._client.pipeline(transaction=False) as pipeline:
                if deletes:
                    pipeline.unlink(*deletes)
                for key, life_ms in zip(touches, self._lives_in_order(len(touches), now_ms), strict=True):
                    pipeline.pexpire(key, life_ms)
                await pipeline.execute()
        except FAILURES as error:
            log.debug("host keys could not be deleted or touched", extra={"reason": str(error)})
            return False
        finally:
            # The store may have begun to count as late as this.
            self._last_end_ms += self._clock() - now_ms
        for queue, done in ((self.deletes, deletes), (self.touches, touches)):
            for _ in done:
                queue.popleft()
        return True

    def _lives_in_order(self, count: int, now_ms: int) -> list[int]:
        """Returns the times to live of `count` keys from now on, in ms.

        Longer than `ttl_ms` where keys would otherwise not end in the order of their touches.
        """
        ttl_ms = self._limits.ttl_ms
        first_ms = max(now_ms + ttl_ms, self._last_end_ms + BATCH_GAP_MS)
        if first_ms > now_ms + ttl_ms + ttl_ms // 8:
            first_ms = now_ms + ttl_ms
        self._last_end_ms = first_ms + count * TOUCH_GAP_MS
        return [first_ms - now_ms + number * TOUCH_GAP_MS for number in range(count)]
