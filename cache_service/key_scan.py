"""Finds keys of a shared host tier, and when each expires. Reads no value."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

ASKED_AT_ONCE = 64
# A reading takes 0.2 ms. One that took longer was interrupted, and is repeated, but not for ever.
LONGEST_READING_MS, MOST_READINGS = 2, 20
# A hint to Redis: keys that one SCAN looks at.
SCANNED_AT_ONCE = 512
# Between two attempts at what Redis refuses: somebody may mend its user's rights.
MOST_PAUSE_MS = 60_000


class Scan(NamedTuple):
    """What is scanned for: rows of a fingerprint in a store."""

    host_tier_id: str
    fingerprint: bytes


class RefusedScans:
    """Scans that Redis refused, and when they are made again: after pauses that double, and that all have in common,
    since it is a user's rights that lack."""

    def __init__(self, first_pause_ms: int) -> None:
        self._first_pause_ms = self._pause_ms = first_pause_ms
        self._scans: set[Scan] = set()
        self._again_ms = 0

    def is_due(self, scan: Scan, now_ms: int) -> bool:
        """Returns whether it was refused and is to be made now."""
        return scan in self._scans and now_ms >= self._again_ms

    def add(self, scan: Scan, now_ms: int) -> None:
        """Notes that it was refused now."""
        self._scans.add(scan)
        self._again_ms = now_ms + self._pause_ms
        self._pause_ms = min(2 * self._pause_ms, MOST_PAUSE_MS)

    def __len__(self) -> int:
        return len(self._scans)

    def allowed(self, scan: Scan) -> bool:
        """Notes that it was made. Returns whether it is the first of those that were refused: the others are due."""
        if scan not in self._scans:
            return False  # it may have had nothing to ask what is refused
        self._scans.discard(scan)
        is_first = self._pause_ms != self._first_pause_ms
        self._pause_ms, self._again_ms = self._first_pause_ms, 0
        return is_first

    def lost(self, host_tier_id: str) -> None:
        """Forgets those of a store that is lost."""
        self._scans = {scan for scan in self._scans if scan.host_tier_id != host_tier_id}


async def find_keys(client: Any, prefix: bytes, pause_s: float) -> AsyncIterator[list[bytes]]:
    """Yields the keys that begin so, in no order, with a pause after each SCAN."""
    cursor = 0
    while True:
        cursor, keys = await client.scan(cursor, match=literal(prefix) + b"*", count=SCANNED_AT_ONCE)
        if keys:
            yield keys
        if not cursor:
            return
        await asyncio.sleep(pause_s)


async def with_ends_ms(client: Any, keys: list[bytes]) -> list[tuple[int, bytes]]:
    """Returns when each key expires, in ms on the store's clock. Asks for a few at a time, since that clock goes on."""
    found: list[tuple[int, bytes]] = []
    for at in range(0, len(keys), ASKED_AT_ONCE):
        some = keys[at : at + ASKED_AT_ONCE]
        for _ in range(MOST_READINGS):
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.time()
                for key in some:
                    pipeline.pttl(key)
                pipeline.time()
                begin, *lives_ms, end = await pipeline.execute()
            now_ms = _in_ms(begin)
            if _in_ms(end) - now_ms <= LONGEST_READING_MS:
                break
        found += zip((now_ms + life_ms for life_ms in lives_ms), some, strict=True)
    return found


def _in_ms(time: tuple[int, int]) -> int:
    """Returns what Redis says with TIME, seconds and microseconds, in ms."""
    seconds, micros = time
    return seconds * 1000 + micros // 1000


def literal(text: bytes) -> bytes:
    """Returns a glob that matches exactly this text."""
    return b"".join(b"\\" + bytes((byte,)) if byte in b"*?[]^-\\" else bytes((byte,)) for byte in text)
