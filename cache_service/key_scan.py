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


class _Pause(NamedTuple):
    end_ms: int = 0
    length_ms: int = 0


class RefusedScans:
    """Scans that Redis refused, and when each is made again: after pauses that double.

    One that is allowed makes all others due, since they lacked the same right. Each has a pause of its own: where one
    is refused for ever, the others are tried all the same.
    """

    def __init__(self, first_pause_ms: int) -> None:
        self._first_pause_ms = first_pause_ms
        self._pauses: dict[Scan, _Pause] = {}
        self._is_told = True  # whether the log says how the last one went: False once one was refused

    def is_due(self, scan: Scan, now_ms: int) -> bool:
        """Returns whether it was refused and is to be made now."""
        return scan in self._pauses and now_ms >= self._pauses[scan].end_ms

    def add(self, scan: Scan, now_ms: int) -> None:
        """Notes that it was refused now."""
        before = self._pauses.get(scan, _Pause())
        length_ms = min(2 * before.length_ms, MOST_PAUSE_MS) or self._first_pause_ms
        self._pauses[scan] = _Pause(now_ms + length_ms, length_ms)
        self._is_told = False

    def __len__(self) -> int:
        return len(self._pauses)

    def allowed(self, scan: Scan) -> bool:
        """Notes that it was made. Returns whether it is the first one since some were refused."""
        if self._pauses.pop(scan, None) is None:
            return False  # it may have had nothing to ask what is refused
        self._pauses = dict.fromkeys(self._pauses, _Pause())
        is_first, self._is_told = not self._is_told, True
        return is_first

    def failed(self, scan: Scan) -> None:
        """Notes that it failed by a fault of ours: it is not made again."""
        self._pauses.pop(scan, None)

    def lost(self, host_tier_id: str) -> None:
        """Forgets those of a store that is lost."""
        self._pauses = {scan: pause for scan, pause in self._pauses.items() if scan.host_tier_id != host_tier_id}


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
