"""Keys expire in the order in which they were touched, even if the store executes commands late."""

from __future__ import annotations

from collections import deque

import pytest

from cache_service.key_changes import BATCH_GAP_MS, ChangeLimits, KeyChanges
from cache_service.key_scan import with_ends_ms

TTL_MS = 60_000


class SlowStore:
    """A Redis client with a clock of its own.

    delays_ms: for each pipeline in turn, the time before its first PEXPIRE or PTTL is executed. key_ms: the time that
    each PEXPIRE takes.
    """

    def __init__(self, *delays_ms: int, key_ms: int = 0) -> None:
        self.delays_ms, self.key_ms = deque(delays_ms), key_ms
        self.now_ms = 1_000_000
        self.ends_ms: dict[bytes, int] = {}
        self.num_readings = 0
        self._calls: list[tuple[str, bytes, int]] = []

    def clock(self) -> int:
        return self.now_ms

    def pipeline(self, transaction: bool) -> SlowStore:
        self._calls = []
        return self

    async def __aenter__(self) -> SlowStore:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    def pexpire(self, key: bytes, life_ms: int) -> None:
        self._calls.append(("pexpire", key, life_ms))

    def pttl(self, key: bytes) -> None:
        self._calls.append(("pttl", key, 0))

    def time(self) -> None:
        self._calls.append(("time", b"", 0))

    async def execute(self) -> list[object]:
        self.num_readings += 1
        delay_ms = self.delays_ms.popleft() if self.delays_ms else 0
        replies: list[object] = []
        for nth, (name, key, life_ms) in enumerate(self._calls):
            if nth == 1 or (nth == 0 and name == "pexpire"):
                self.now_ms += delay_ms
            if name == "time":
                replies.append((self.now_ms // 1000, self.now_ms % 1000 * 1000))
            elif name == "pttl":
                replies.append(self.ends_ms[key] - self.now_ms)
            else:
                self.ends_ms[key] = self.now_ms + life_ms
                replies.append(1)
                self.now_ms += self.key_ms
        return replies


def names(count: int) -> list[bytes]:
    return [b"%03d" % number for number in range(count)]


@pytest.mark.parametrize("delays_ms", [(0, 0, 0), (5 * BATCH_GAP_MS, 0, 0), (0, 3000, 20), (700, 500, 300)], ids=str)
@pytest.mark.parametrize("key_ms", [0, 9])
async def test_keys_end_in_the_order_of_their_touches(delays_ms: tuple[int, ...], key_ms: int) -> None:
    store = SlowStore(*delays_ms, key_ms=key_ms)
    changes = KeyChanges(store, ChangeLimits(TTL_MS, 1000, keys_per_command=16, retry_pause_s=0), store.clock)
    changes.touch(names(48))
    await changes.send()
    assert sorted(store.ends_ms, key=store.ends_ms.__getitem__) == names(48)
    assert len(set(store.ends_ms.values())) == 48
    assert all(end_ms >= 1_000_000 + TTL_MS for end_ms in store.ends_ms.values())


async def test_touches_follow_those_of_an_earlier_service() -> None:
    """In a busy minute keys end later than their time to live from the touch."""
    store = SlowStore()
    store.ends_ms = {b"earlier": store.now_ms + TTL_MS + 3000}
    changes = KeyChanges(store, ChangeLimits(TTL_MS, 1000, keys_per_command=16, retry_pause_s=0), store.clock)
    changes.follow(TTL_MS + 3000)
    changes.touch(names(48))
    await changes.send()
    assert sorted(store.ends_ms, key=store.ends_ms.__getitem__) == [b"earlier", *names(48)]


async def test_an_interrupted_reading_of_ends_is_repeated() -> None:
    store = SlowStore(0, 40, 0)
    keys = names(100)
    store.ends_ms = {key: 5_000_000 + 4 * number for number, key in enumerate(keys)}
    found = await with_ends_ms(store, keys)
    assert found == [(store.ends_ms[key], key) for key in keys]
    assert store.num_readings == 3


async def test_a_store_that_is_always_slow_is_read_all_the_same() -> None:
    store = SlowStore(*[40] * 20)
    store.ends_ms = {b"key": 5_000_000}
    assert await with_ends_ms(store, [b"key"]) == [(5_000_000 - 40, b"key")]
    assert store.num_readings == 20
