"""Host keys with the real manager behind them: rows come back by the scan, and go with the store."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncIterator

import pytest
from redis import Redis

from cache_service.core.base.manager_config import ManagerConfig
from cache_service.core.base.page_hash import namespace_digest, page_hashes
from cache_service.core.cache_manager import CacheManager
from cache_service.core.host.host_key import HostKey, build_key
from cache_service.host_keys import RedisHostKeys, open_client
from session.messages import Hello
from session.words import HASH_BYTES, TOKEN_BYTES, GroupKind, GroupSpec, HostTierKind, Namespace, PageHash, WorkerId
from tests.cache_service.test_host_keys import CONFIG, FINGERPRINT, redis, server, until
from tests.core import audit
from tests.core.at_once import clear_at_once
from tests.redis_process import RedisProcess

__all__ = ["redis", "server"]

PAGE_TOKENS = 4
NUM_PAGES = 50
NAMESPACE = Namespace("model")
# One token more than the pages hold, since the last token of a prompt is always computed.
TOKENS = array("i", range(NUM_PAGES * PAGE_TOKENS + 1)).tobytes()


def keys() -> list[bytes]:
    whole = TOKENS[: NUM_PAGES * PAGE_TOKENS * TOKEN_BYTES]
    packed = page_hashes(namespace_digest(NAMESPACE), b"", whole, PAGE_TOKENS * TOKEN_BYTES)
    hashes = [packed[first : first + HASH_BYTES] for first in range(0, len(packed), HASH_BYTES)]
    return [build_key(HostKey(FINGERPRINT, 0, 0, PageHash(page_hash))) for page_hash in hashes]


def host_tokens(manager: CacheManager) -> int:
    return manager.match(NAMESPACE, TOKENS, WorkerId("w"))[0].match.host_tokens


@pytest.fixture
def manager() -> CacheManager:
    manager = CacheManager(ManagerConfig(), "epoch")
    groups = (GroupSpec("full", GroupKind.FULL, 100, page_bytes=4096),)
    shared = HostTierKind.SHARED
    hello = Hello(WorkerId("w"), "h:1", "i1", FINGERPRINT, PAGE_TOKENS, groups, shared, "tier-1")
    manager.hello(hello, now_ms=0)
    return manager


@pytest.fixture
async def host_keys(server: RedisProcess, redis: Redis, manager: CacheManager) -> AsyncIterator[RedisHostKeys]:
    redis.mset(dict.fromkeys(keys(), b"v"))
    host_keys = RedisHostKeys(open_client(server.url, CONFIG.timeout_s), manager, CONFIG)
    host_keys.start()
    yield host_keys
    await host_keys.close()
    audit.check(manager)


async def test_rows_come_back_by_the_scan(host_keys: RedisHostKeys, manager: CacheManager) -> None:
    await until(lambda: host_tokens(manager) == NUM_PAGES * PAGE_TOKENS)
    assert manager.stats().host_tier.num_rows == NUM_PAGES


async def test_rows_go_with_a_flush(host_keys: RedisHostKeys, manager: CacheManager, redis: Redis) -> None:
    await until(lambda: host_tokens(manager))
    redis.flushall()
    await until(lambda: not host_tokens(manager))
    assert manager.stats().host_tier.num_rows == 0


async def test_the_breaker_opens_while_redis_is_gone(
    host_keys: RedisHostKeys, manager: CacheManager, server: RedisProcess
) -> None:
    await until(lambda: host_tokens(manager))
    server.kill()
    await until(lambda: manager.stats().host_tier.breaker_open)
    server.start()
    await until(lambda: not _open_after_a_tick(manager))


def _open_after_a_tick(manager: CacheManager) -> bool:
    manager.tick(time.monotonic_ns() // 1_000_000)
    return manager.stats().host_tier.breaker_open


async def test_what_the_manager_deletes_goes_from_redis(
    host_keys: RedisHostKeys, manager: CacheManager, redis: Redis
) -> None:
    await until(lambda: host_tokens(manager))
    cleared = clear_at_once(manager, None, unused_only=False)
    assert cleared.num_host_rows == NUM_PAGES
    host_keys.delete(manager.tiers.take_deletes())
    await until(lambda: redis.keys(b"stemcache:1:*:*") == [])
