"""Host keys where Redis refuses commands or holds what is not ours: it is said once, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as LostConnection

from cache_service import host_keys as host_keys_module
from cache_service.core.base.manager_config import ManagerConfig
from cache_service.core.cache_manager import CacheManager
from cache_service.core.host.host_key import scan_prefix
from cache_service.host_keys import RedisHostKeys, open_client
from cache_service.key_scan import RefusedScans, Scan
from session.messages import Hello
from session.protocol import MAX_SENTINEL_BYTES, SENTINEL_KEY
from session.words import GroupKind, GroupSpec, HostTierKind, WorkerId
from tests.cache_service.engine import Engine, path
from tests.cache_service.peer import started
from tests.cache_service.test_host_keys import CONFIG, FINGERPRINT, Rows, host_keys, key, redis, rows, server, until
from tests.core import audit
from tests.redis_process import RedisProcess

__all__ = ["host_keys", "redis", "rows", "server"]

TIER = ("tier-1", FINGERPRINT)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


SERVICE = ("reset", "on", ">pw", "~*", "&*", "+@all")


def as_service(server: RedisProcess, redis: Redis, *rights: str) -> str:
    """Gives the user these rights. Returns its URL."""
    redis.execute_command("ACL", "SETUSER", "service", *SERVICE, *rights)
    return f"redis://service:pw@127.0.0.1:{server.port}/0"


async def some_looks() -> None:
    await asyncio.sleep(10 * CONFIG.watch_interval_s)


@pytest.mark.parametrize("refused", ["scan", "multi", "time", "pttl", "exists"])
async def test_a_scan_that_redis_refuses_has_ended_and_is_told_once(
    server: RedisProcess, redis: Redis, rows: Rows, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    redis.set(key(1), "v")
    keys = RedisHostKeys(open_client(as_service(server, redis, f"-{refused}"), 0.3), rows, CONFIG)
    keys.start()
    await until(lambda: rows.scanned == {TIER})
    await some_looks()
    await keys.close()
    (told,) = warnings(caplog)
    assert "neither found nor counted" in told
    (record,) = [record for record in caplog.records if record.getMessage() == told]
    assert any(word in record.__dict__["reason"] for word in ("permission", "MULTI"))
    assert (rows.adopted, rows.health) == ({}, []), "the store answers"


def told_allowed(caplog: pytest.LogCaptureFixture) -> int:
    return sum("allows the scan" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("refused", ["scan", "multi", "time", "pttl", "exists"])
async def test_a_scan_that_was_refused_finds_the_rows_once_it_is_allowed(
    server: RedisProcess, redis: Redis, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    caplog.set_level("INFO")
    other, empty = bytes(32), bytes([1]) * 32
    for number in range(3):
        redis.set(key(number), "v", px=50_000 - 1_000 * number)
        redis.set(key(number, other), "v")
    rows = Rows(TIER, ("tier-1", other), ("tier-1", empty))
    config = replace(CONFIG, refused_pause_s=0.05)
    keys = RedisHostKeys(open_client(as_service(server, redis, f"-{refused}"), 0.3), rows, config)
    keys.start()
    await until(lambda: len(rows.scanned) == 3)
    await asyncio.sleep(0.5)  # refused again and again
    assert rows.adopted == {} and told_allowed(caplog) == 0
    as_service(server, redis)
    await until(lambda: len(rows.adopted) == 2)
    await some_looks()
    await keys.close()
    assert rows.adopted[TIER] == [key(number) for number in range(3)], "once, and in their order"
    assert set(rows.adopted["tier-1", other]) == {key(number, other) for number in range(3)}
    assert (len(warnings(caplog)), told_allowed(caplog)) == (1, 1)
    assert rows.health == []


async def test_a_clear_call_while_a_scan_is_refused_outlives_a_restart(
    server: RedisProcess, redis: Redis, rows: Rows
) -> None:
    """The rows of before are not known to it, so its marks stay, and the next service that may scan deletes them."""
    redis.set(key(1), "v")
    keys = RedisHostKeys(open_client(as_service(server, redis, "-scan"), 0.3), rows, CONFIG)
    keys.start()
    await until(lambda: rows.scanned == {TIER})
    await keys.clear_begins()
    keys.clear_ends(keep_marks=False)
    await some_looks()
    await keys.close()
    then = Rows(TIER)
    after = RedisHostKeys(open_client(as_service(server, redis), 0.3), then, CONFIG)
    after.start()
    await until(lambda: then.scanned == {TIER})
    await after.close()
    assert not redis.exists(key(1)) and not then.adopted
    assert not redis.keys(b"stemcache:1:clearing:*")


def test_pauses_between_refused_scans_double_up_to_a_minute() -> None:
    refused, one, two = RefusedScans(1_000), Scan("tier-1", b"1"), Scan("tier-1", b"2")
    now_ms, pauses = 0, []
    assert not refused.is_due(one, now_ms), "it was never refused"
    refused.add(two, now_ms)
    for _ in range(9):
        refused.add(one, now_ms)
        began_ms = now_ms
        while not refused.is_due(one, now_ms):
            now_ms += 1_000
        assert refused.is_due(two, now_ms)
        pauses.append((now_ms - began_ms) // 1_000)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert refused.allowed(one) and refused.is_due(two, now_ms) and not refused.is_due(one, now_ms)
    refused.add(two, now_ms)
    assert not refused.is_due(two, now_ms + 999) and refused.is_due(two, now_ms + 1_000), "from the first pause on"
    assert refused.allowed(two) and not refused
    refused.add(one, now_ms)
    refused.add(two, now_ms)
    assert refused.allowed(one) and not refused.allowed(two), "told once"


async def test_a_scan_that_is_refused_for_ever_holds_up_no_other(server: RedisProcess, redis: Redis) -> None:
    """Rights by a key's beginning: the user may ask for one fingerprint's keys alone."""
    other = bytes(32)
    for fingerprint in (FINGERPRINT, other):
        redis.set(key(1, fingerprint), "v", px=50_000)
    rows = Rows(TIER, ("tier-1", other))
    config = replace(CONFIG, refused_pause_s=0.05)
    keys = RedisHostKeys(open_client(as_service(server, redis, "-pttl"), 0.3), rows, config)
    keys.start()
    await until(lambda: len(rows.scanned) == 2)
    patterns = [b"~*clearing*", b"~" + SENTINEL_KEY, b"~" + scan_prefix(other) + b"*"]
    redis.execute_command("ACL", "SETUSER", "service", "resetkeys", "+@all", *patterns)
    await until(lambda: rows.adopted)
    await some_looks()
    await keys.close()
    assert rows.adopted == {("tier-1", other): [key(1, other)]}


async def test_a_refused_scan_that_then_meets_a_fault_is_not_made_again(
    server: RedisProcess, redis: Redis, rows: Rows, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise AssertionError("a fault of ours")

    redis.set(key(1), "v")
    config = replace(CONFIG, refused_pause_s=0.05)
    keys = RedisHostKeys(open_client(as_service(server, redis, "-pttl"), 0.3), rows, config)
    keys.start()
    await until(lambda: rows.scanned == {TIER})
    monkeypatch.setattr(host_keys_module, "with_ends_ms", broken)
    as_service(server, redis)
    await until(lambda: len(warnings(caplog)) == 2)
    await some_looks()
    await keys.close()
    assert len(warnings(caplog)) == 2 and rows.adopted == {}


@pytest.mark.parametrize("was_cleared", [False, True])
async def test_rows_of_before_are_found_and_those_written_meanwhile_stay(
    server: RedisProcess, redis: Redis, caplog: pytest.LogCaptureFixture, *, was_cleared: bool
) -> None:
    """Over gRPC: an engine writes while the scan is refused. `was_cleared`: an earlier service left a Clear call."""
    before, since = path("before"), path("since")
    async with started(redis_url=server.url, tick_ms=10) as client:
        engine = Engine(client, redis)
        prefix = (await engine.attach()).key_prefix
        await engine.save(before, 0, 6)
    mark = prefix.replace(":1:", ":1:clearing:").removesuffix(":")
    if was_cleared:
        redis.set(mark, "1")
    async with started(redis_url=as_service(server, redis, "-scan"), tick_ms=10) as client:
        engine = Engine(client, redis)
        await engine.attach()
        await until(lambda: warnings(caplog))
        assert (await engine.lookup(before)).usable_pages == 0
        await engine.save(since, 0, 5)
        as_service(server, redis)
        num_left = 5 if was_cleared else 11
        await until(lambda: len(redis.keys(f"{prefix}*")) == num_left and not redis.exists(mark))
        await until(lambda: client.manager.stats().host_tier.num_rows == num_left)
        found = [(await engine.lookup(one, lease=False)).usable_pages for one in (before, since)]
        assert found == [num_left - 5, 5]
        audit.check(client.manager)


async def test_a_scan_that_lost_its_connection_is_made_again_and_told_once(
    server: RedisProcess, redis: Redis, rows: Rows, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.set(key(1), "v")
    client = open_client(server.url, CONFIG.timeout_s)
    scan, failures = client.scan, iter([LostConnection("gone")] * 3)

    async def fail_at_first(*args: Any, **named: Any) -> Any:
        for failure in failures:
            raise failure
        return await scan(*args, **named)

    monkeypatch.setattr(client, "scan", fail_at_first)
    keys = RedisHostKeys(client, rows, CONFIG)
    keys.start()
    await until(lambda: rows.scanned == {TIER})
    await keys.close()
    assert rows.adopted == {TIER: [key(1)]}
    assert warnings(caplog) == ["the scan for host rows failed; it is made again"]


async def test_a_fault_while_rows_are_added_ends_the_scan(
    server: RedisProcess, redis: Redis, rows: Rows, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(host_tier_id: str, fingerprint: bytes, found: Sequence[bytes]) -> int:
        raise RuntimeError("a fault")

    monkeypatch.setattr(rows, "add_scanned", fail)
    redis.set(key(1), "v")
    keys = RedisHostKeys(open_client(server.url, CONFIG.timeout_s), rows, CONFIG)
    keys.start()
    await until(lambda: rows.scanned == {TIER})
    await some_looks()
    await keys.close()
    assert len(warnings(caplog)) == 1


async def test_foreign_keys_of_a_fingerprint_keep_no_row_from_being_adopted(
    server: RedisProcess, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    names = [b"-1:0", b"0:-1", b"99:0", b"0:7", b"0:99999", b"9" * 5000 + b":0"]
    redis.mset({scan_prefix(FINGERPRINT) + name + b":" + b"a" * 64: b"foreign" for name in names})
    redis.set(key(1), "v", ex=60)
    manager = CacheManager(ManagerConfig(scans_host_tiers=True), "epoch")
    groups = (GroupSpec("full", GroupKind.FULL, 100, page_bytes=4096),)
    manager.hello(Hello(WorkerId("w"), "h:1", "i1", FINGERPRINT, 4, groups, HostTierKind.SHARED, "tier-1"), now_ms=0)
    index = manager.tiers.shared["tier-1"]
    assert index.unscanned
    keys = RedisHostKeys(open_client(server.url, CONFIG.timeout_s), manager, CONFIG)
    keys.start()
    await until(lambda: not index.unscanned)
    await keys.close()
    assert manager.stats().host_tier.num_rows == 1
    assert warnings(caplog) == []


@pytest.mark.parametrize("value", [b"", b"x" * (MAX_SENTINEL_BYTES + 1)])
async def test_a_foreign_sentinel_drops_the_index_and_is_told_once(
    host_keys: RedisHostKeys, redis: Redis, rows: Rows, caplog: pytest.LogCaptureFixture, value: bytes
) -> None:
    redis.set(SENTINEL_KEY, value)
    await until(lambda: rows.lost)
    await some_looks()
    assert rows.lost == ["tier-1"]
    assert [text for text in warnings(caplog) if "foreign value" in text] == warnings(caplog)[1:]
    assert len(warnings(caplog)) == 2
    assert redis.get(SENTINEL_KEY) == value, "it is somebody's"
    redis.delete(SENTINEL_KEY)
    await until(lambda: redis.get(SENTINEL_KEY) == b"tier-1")


async def test_a_sentinel_that_cannot_be_put_back_is_lost_once(
    host_keys: RedisHostKeys, redis: Redis, rows: Rows
) -> None:
    redis.config_set("maxmemory", 1)
    try:
        redis.delete(SENTINEL_KEY)
        await until(lambda: rows.lost)
        await some_looks()
        assert rows.lost == ["tier-1"]
    finally:
        redis.config_set("maxmemory", 0)
    await until(lambda: redis.get(SENTINEL_KEY) == b"tier-1")
    assert rows.health == [], "what a full store has is fetched all the same"


async def test_two_flushes_are_noticed_twice(host_keys: RedisHostKeys, redis: Redis, rows: Rows) -> None:
    for num_lost in (1, 2):
        redis.flushall()
        await until(lambda: redis.exists(SENTINEL_KEY))
        assert len(rows.lost) == num_lost
