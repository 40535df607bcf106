"""Marks in the store that a Clear call is not finished: a service that is started anew adopts no row while they stand.

Rows are forgotten at once, their keys are deleted in the background. A service that ends in between would find the rest
of the keys in its scan, and could not tell them from others. So it deletes what it finds where there is a mark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from redis.exceptions import RedisError

from session.protocol import HOST_KEY_PREFIX

FAILURES = (RedisError, OSError, TimeoutError)

log = logging.getLogger(__name__)


class ClearMarks:
    """One key for each fingerprint, with the time to live of the rows: no cleared key outlives it."""

    def __init__(self, client: Any, ttl_ms: int) -> None:
        self._client, self._ttl_ms = client, ttl_ms
        self._marked: set[bytes] = set()
        self._kept: set[bytes] = set()  # marked by this process for good
        self._left: set[bytes] = set()  # marked by an earlier process
        self._num_open = 0

    async def begin(self, fingerprints: Iterable[bytes]) -> None:
        """Sets the marks, before the first row is forgotten. If the store fails, Clear goes on without them."""
        self._num_open += 1
        for fingerprint in set(fingerprints):
            try:
                if await self.is_left(fingerprint):
                    self._left.add(fingerprint)
                self._marked.add(fingerprint)
                await self._client.set(self._key(fingerprint), b"1", px=self._ttl_ms)
            except FAILURES as error:
                log.warning("a Clear call could not be marked", extra={"reason": str(error)})

    def end(self, *, keep: bool) -> None:
        """Ends a call. With `keep` rows stay that only this process knows to hide, and so do their marks."""
        self._num_open -= 1
        if keep:
            self._kept |= self._marked

    async def remove(self) -> None:
        """Removes the marks of calls that have ended; all their keys have been deleted."""
        done = self._marked - self._kept
        if done and not self._num_open:
            try:
                await self._client.unlink(*map(self._key, done))
                self._marked -= done
            except FAILURES as error:
                log.debug("marks of Clear calls could not be removed", extra={"reason": str(error)})

    async def is_left(self, fingerprint: bytes) -> bool:
        """Returns whether an earlier process left a mark."""
        is_own = fingerprint in self._marked
        return fingerprint in self._left or (not is_own and bool(await self._client.exists(self._key(fingerprint))))

    async def drop(self, fingerprint: bytes) -> None:
        """Removes the mark of an earlier process, whose keys have been deleted."""
        if fingerprint not in self._marked:
            await self._client.unlink(self._key(fingerprint))
        self._left.discard(fingerprint)

    def _key(self, fingerprint: bytes) -> bytes:
        return HOST_KEY_PREFIX + b"clearing:" + fingerprint.hex().encode()
