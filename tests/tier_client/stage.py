"""Clients of HostTier on a real cache service and a real Redis, all in processes of their own but the client."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from protos.v1 import cache_pb2, cache_pb2_grpc
from session.words import GroupKind
from tests.e2e.processes import ServiceProcess, cache_process
from tests.redis_process import RedisProcess, free_port
from tier_client.client import TierClient
from tier_client.values import PageGroup, PagePath, PageRange, TierClientConfig, fingerprint_of

FULL = PageGroup("full", GroupKind.FULL, 256)
STATE = PageGroup("state", GroupKind.STATE, 512)


def payload(group: int, page: int, text: str = "") -> bytes:
    """Bytes that say which page they are of."""
    num_bytes = (FULL, STATE)[group].page_bytes
    return hashlib.shake_256(f"{text} {group} {page}".encode()).digest(num_bytes)


def path(names: Iterable[object], salt: str = "") -> PagePath:
    chained, ids = b"", b""
    for name in names:
        chained = hashlib.sha256(chained + repr(name).encode()).digest()
        ids += chained
    return PagePath(page_ids=ids, salt=salt)


def all_pages(end: int, *groups: int) -> list[PageRange]:
    return [PageRange(group, 0, end) for group in groups or (0,)]


class Stage:
    """A cache service at an address that stays, so that it may be killed and started again."""

    def __init__(self, folder: Path, redis: RedisProcess) -> None:
        self.redis = redis
        self.test = ""  # tests that share the stage share no page
        self.stack = ExitStack()
        self.cache: ServiceProcess = cache_process(
            folder, listen=f"127.0.0.1:{free_port()}", redis_url=redis.url, tick_ms=10
        )
        self.stack.callback(self.cache.kill)
        self.cache.start()

    def client(self, *groups: PageGroup, **settings: Any) -> TierClient:
        usual: dict[str, Any] = {
            "cache_address": self.cache.settings["listen"],
            "redis_url": self.redis.url,
            "engine": "test",
            "model": "model",
            "fingerprint": fingerprint_of({"model": "m", "test": self.test}),
            "page_tokens": 16,
            "groups": groups or (FULL,),
            # A slow machine must not turn an answer into a miss; after the short pause what is back is asked again.
            "call_timeout_s": 20.0,
            "store_timeout_s": 20.0,
            "pause_s": 0.01,
        }
        client = TierClient(TierClientConfig(**{**usual, **settings}))
        self.stack.callback(client.close)
        return client

    def stats(self) -> Any:
        """What the service says of itself over gRPC."""
        with grpc.insecure_channel(str(self.cache.settings["listen"])) as channel:
            stub: Any = cache_pb2_grpc.PrefixCacheStub(channel)
            return stub.Stats(cache_pb2.StatsRequest(), timeout=20, wait_for_ready=True)
