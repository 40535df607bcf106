"""Host keys where Redis refuses commands or holds what is not ours: it is said once, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as LostConnection

from cache_service.core.base.manager_config import ManagerConfig
from cache_service.core.cache_manager import CacheManager
from cache_service.core.host.host_key import scan_prefix
from cache_service.host_keys import RedisHostKeys, open_client
from session.messages import Hello
from session.protocol import MAX_SENTINEL_BYTES, SENTINEL_KEY
from session.words import GroupKind, GroupSpec, HostTierKind, WorkerId
from tests.cache_service.test_host_keys import CONFIG, FINGERPRINT, Rows, host_keys, key, redis, rows, server, until
from tests.redis_process import RedisProcess

__all__ = ["host_keys", "redis", "rows", "server"]

TIER = ("tier-1", FINGERPRINT)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def some_looks() -> None:
    await asyncio.sleep(10 * CONFIG.watch_interval_s)


@pytest.mark.parametrize("refused", ["scan", "multi", "time", "pttl", "exists"])
async def test_a_scan_that_redis_refuses_has_ended_and_is_told_once(
    server: RedisProcess, redis: Redis, rows: Rows, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    redis.set(key(1), "v")
    redis.execute_command("ACL", "SETUSER", "service", "reset", "on", ">pw", "~*", "&*", "+@all", f"-{refused}")
    keys = RedisHostKeys(open_client(f"redis://service:pw@127.0.0.1:{server.port}/0", 0.3), rows, CONFIG)
    keys.start()
    await until(lambda: rows.scanned == {TIER})
    await some_looks()
    await keys.close()
    (told,) = warnings(caplog)
    assert "neither found nor counted" in told
    (record,) = [record for record in caplog.records if record.getMessage() == told]
    assert any(word in record.__dict__["reason"] for word in ("permission", "MULTI"))
    assert (rows.adopted, rows.health) == ({}, []), "the store answers"


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
