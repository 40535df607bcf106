"""Finds keys of a shared host tier, and when each expires. Reads no value."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

ASKED_AT_ONCE = 64
# A reading takes 0.2 ms. One that took longer was interrupted, and is repeated, but not for ever.
LONGEST_READING_MS, MOST_READINGS = 2, 20
# A hint to Redis: keys that one SCAN looks at.
SCANNED_AT_ONCE = 512


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
