"""An attached engine as the cache service sees one, driven call by call; it reads and writes values with redis-py."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

from redis import Redis

from protos.v1 import cache_pb2, host_tier_pb2, host_tier_pb2_grpc, types_pb2
from tests.cache_service.peer import Client

TIER = "tier-1"
PAGE_BYTES = 64
DONE, FAILED = cache_pb2.TRANSFER_STATUS_DONE, cache_pb2.TRANSFER_STATUS_FAILED
MISSING, CORRUPT = cache_pb2.TRANSFER_STATUS_MISSING, cache_pb2.TRANSFER_STATUS_CORRUPT
FULL = host_tier_pb2.TierGroup(name="full", kind=types_pb2.GROUP_KIND_FULL, page_bytes=PAGE_BYTES)
WINDOW = host_tier_pb2.TierGroup(
    name="window", kind=types_pb2.GROUP_KIND_WINDOW, window_tokens=33, page_bytes=PAGE_BYTES
)
STATE = host_tier_pb2.TierGroup(name="state", kind=types_pb2.GROUP_KIND_STATE, page_bytes=PAGE_BYTES)


def attach_request(**fields: Any) -> host_tier_pb2.AttachRequest:
    usual: dict[str, Any] = {
        "protocol_version": 1,
        "engine": "engine",
        "fingerprint": b"f" * 32,
        "model": "model",
        "page_tokens": 16,
        "groups": [FULL],
        "num_ranks": 1,
        "host_tier_id": TIER,
    }
    return host_tier_pb2.AttachRequest(**{**usual, **fields})


def path(names: Iterable[object], salt: str = "") -> host_tier_pb2.TierPath:
    """Ids chained as an engine chains them."""
    chained, ids = b"", b""
    for name in names:
        chained = sha256(chained + repr(name).encode()).digest()
        ids += chained
    return host_tier_pb2.TierPath(salt=salt, page_ids=ids)


def range_of(first: int, end: int, group: int = 0) -> host_tier_pb2.TierPageRange:
    return host_tier_pb2.TierPageRange(group=group, first_page=first, num_pages=end - first)


def keys(pages: Sequence[Any], rank: int = 0) -> list[bytes]:
    """Of all groups, one after the other."""
    return [
        f"{one.key_prefix}{rank}:{one.page_hashes[at : at + 32].hex()}".encode()
        for one in pages
        for at in range(0, len(one.page_hashes), 32)
    ]


def numbers(pages: Any) -> list[int]:
    return list(struct.unpack(f"<{len(pages.pages) // 4}I", pages.pages))


class Engine:
    """Calls of one attachment."""

    def __init__(self, client: Client, redis: Redis | None = None) -> None:
        self.stub: Any = host_tier_pb2_grpc.HostTierStub(client.channel)
        self.redis = redis
        self.attached: Any = None

    async def attach(self, **fields: Any) -> Any:
        self.attached = await self.stub.Attach(attach_request(**fields))
        return self.attached

    @property
    def id(self) -> dict[str, Any]:
        return {"epoch": self.attached.epoch, "attachment": self.attached.attachment}

    async def lookup(self, asked: Any, local: int = 0, lease: bool = True) -> Any:
        request = host_tier_pb2.LookupRequest(**self.id, path=asked, local_pages=local, lease=lease)
        return await self.stub.Lookup(request)

    async def reserve(self, asked: Any, *ranges: Any) -> Any:
        return await self.stub.Reserve(host_tier_pb2.ReserveRequest(**self.id, path=asked, ranges=ranges))

    def written(self, reserved: Any) -> list[host_tier_pb2.WrittenPages]:
        counts = [(one.group, len(one.pages) // 4) for one in reserved.pages]
        return [host_tier_pb2.WrittenPages(group=g, num_pages=n, num_bytes=n * PAGE_BYTES) for g, n in counts]

    async def commit(self, ticket: int, rank: int = 0, status: Any = DONE, written: Iterable[Any] = ()) -> Any:
        request = host_tier_pb2.CommitRequest(**self.id, ticket=ticket, rank=rank, status=status, written=written)
        return await self.stub.Commit(request)

    async def save(self, asked: Any, first: int, end: int, *groups: int) -> Any:
        """Reserve these pages, write a value for each, and commit them."""
        reserved = await self.reserve(asked, *(range_of(first, end, group) for group in groups or (0,)))
        assert self.redis is not None
        for key in keys(reserved.pages):
            self.redis.set(key, b"value of " + key)
        return await self.commit(reserved.ticket, written=self.written(reserved))

    async def release(self, lease: int, num_pages: int = 0, status: Any = DONE) -> int:
        end = host_tier_pb2.LeaseEnd(lease=lease, status=status, num_pages=num_pages)
        return (await self.stub.Release(host_tier_pb2.ReleaseRequest(**self.id, ends=[end]))).num_released
