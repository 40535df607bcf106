"""HostTier over real gRPC, with the real manager and a real Redis: what engines save, find, and lose."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from redis import Redis

from cache_service import host_tier_codec as codec
from cache_service.core.attachments.messages import Found, Reserved
from protos.v1 import cache_pb2, host_tier_pb2, host_tier_pb2_grpc, types_pb2
from session.protocol import SENTINEL_KEY
from tests.cache_service.engine import (
    FULL,
    MISSING,
    PAGE_BYTES,
    STATE,
    TIER,
    WINDOW,
    Engine,
    keys,
    numbers,
    path,
    range_of,
)
from tests.cache_service.peer import Client, Clock, started, until
from tests.cache_service.test_host_keys import redis, server
from tests.core import audit
from tests.redis_process import RedisProcess
from tests.rpc.echo import code_of

__all__ = ["redis", "server"]

PROMPT = path(range(10))


@pytest.fixture
async def client(server: RedisProcess, redis: Redis) -> AsyncIterator[Client]:
    redis.set(SENTINEL_KEY, TIER)
    async with started(redis_url=server.url, tick_ms=10) as client:
        yield client
        audit.check(client.manager)


async def hits(client: Client) -> int:
    """Pages that Lookups could use, as Stats tells over gRPC."""
    stats = await client.stub.Stats(cache_pb2.StatsRequest())
    return stats.attachments.usable_pages


async def test_a_second_engine_reads_what_the_first_one_wrote(client: Client, redis: Redis) -> None:
    first, second = Engine(client, redis), Engine(client, redis)
    attached = await first.attach()
    assert attached.limits.max_pages and attached.limits.ttl_ms == 86_400_000
    assert (await first.save(PROMPT, 0, 10)).num_findable == 10
    await second.attach()
    found = await second.lookup(PROMPT)
    assert (found.usable_pages, numbers(found.pages[0])) == (10, list(range(10)))
    assert all(key.startswith(attached.key_prefix.encode()) for key in keys(found.pages))
    assert redis.mget(keys(found.pages)) == [b"value of " + key for key in keys(found.pages)]
    assert await second.release(found.lease, 10) == 1
    assert await hits(client) == 10
    stats = await client.stub.Stats(cache_pb2.StatsRequest())
    assert (stats.host_tier.num_spilled_pages, stats.host_tier.num_fetched_pages) == (10, 10)
    assert stats.attachments.misses == {"none": 1}
    # The store learns the times to live in the order of use.
    await until(lambda: all(redis.pttl(key) > 0 for key in keys(found.pages)))


async def test_each_engine_is_counted_in_stats_and_in_metrics(client: Client, redis: Redis) -> None:
    writer, reader = Engine(client, redis), Engine(client, redis)
    await writer.attach(engine="vllm 0.33.0")
    await reader.attach(engine="sglang 0.5.23")
    await writer.save(PROMPT, 0, 4)
    found = await reader.lookup(PROMPT)
    await reader.release(found.lease, 2, MISSING)
    await reader.lookup(path("never written"))
    stats = (await client.stub.Stats(cache_pb2.StatsRequest())).attachments
    one, two = stats.engines
    assert (one.engine, one.attachment, one.committed_pages, one.num_lookups) == ("vllm 0.33.0", 1, 4, 0)
    assert one.peer == two.peer and one.peer.startswith("ipv4:127.0.0.1:")
    assert (two.num_lookups, two.asked_pages, two.usable_pages, two.fetched_pages) == (2, 23, 4, 2)
    assert dict(two.misses) == {"never_seen": 2}
    assert one.key_prefix == two.key_prefix == writer.attached.key_prefix
    assert (await reader.lookup(PROMPT, lease=False)).miss_reason == types_pb2.MISS_REASON_LOST

    def sample(name: str, engine: str, **labels: str) -> float | None:
        return client.service.registry.get_sample_value(f"stemcache_cache_engine_{name}", {"engine": engine, **labels})

    assert [sample("committed_pages_total", name) for name in ("vllm 0.33.0", "sglang 0.5.23")] == [4, 0]
    assert sample("misses_total", "sglang 0.5.23", reason="never_seen") == 2
    assert sample("misses_total", "sglang 0.5.23", reason="evicted") == 0
    assert client.service.registry.get_sample_value("stemcache_cache_attached_fetched_pages_total") == 2


async def test_groups_with_holes(client: Client, redis: Redis) -> None:
    engine = Engine(client, redis)
    await engine.attach(groups=[FULL, WINDOW, STATE])
    await engine.save(PROMPT, 0, 10, 0)
    await engine.save(PROMPT, 4, 8, 1)
    await engine.save(PROMPT, 7, 8, 2)
    found = await engine.lookup(PROMPT)
    assert (found.usable_pages, found.matched_pages, found.limiting_group) == (8, 10, "window")
    assert found.miss_reason == types_pb2.MISS_REASON_WINDOW_GONE
    assert [(one.group, numbers(one)) for one in found.pages] == [(0, list(range(8))), (1, [6, 7]), (2, [7])]


async def test_the_quota_deletes_the_values_of_the_least_recently_used(server: RedisProcess, redis: Redis) -> None:
    redis.set(SENTINEL_KEY, TIER)
    async with started(redis_url=server.url, tick_ms=10, host_quota_mb=1) as client:
        engine = Engine(client, redis)
        large = host_tier_pb2.TierGroup(name="full", kind=types_pb2.GROUP_KIND_FULL, page_bytes=1 << 18)
        await engine.attach(groups=[large])
        for name in "abc":
            reserved = await engine.reserve(path(name * 2), host_tier_pb2.TierPageRange(num_pages=2))
            redis.mset(dict.fromkeys(keys(reserved.pages), b"v"))
            written = [host_tier_pb2.WrittenPages(num_pages=2, num_bytes=2 << 18)]
            await engine.commit(reserved.ticket, written=written)
        await until(lambda: len(redis.keys(b"stemcache:1:*:0:0:*")) == 4)
        assert not (await engine.lookup(path("aa"))).usable_pages
        assert (await engine.lookup(path("cc"))).usable_pages == 2


async def test_rows_of_engines_come_back_by_the_scan(server: RedisProcess, redis: Redis) -> None:
    redis.set(SENTINEL_KEY, TIER)
    async with started(redis_url=server.url, tick_ms=10) as client:
        engine = Engine(client, redis)
        await engine.attach()
        await engine.save(PROMPT, 0, 10)
        old = engine.attached
    async with started(redis_url=server.url, tick_ms=10) as client:
        engine = Engine(client, redis)
        engine.attached = old
        code, details = await code_of(engine.lookup(PROMPT))
        assert code is grpc.StatusCode.ABORTED and details.startswith("lookup.epoch: ")
        await engine.attach()
        await until(lambda: client.manager.stats().host_tier.num_rows == 10)
        assert (await engine.lookup(PROMPT)).usable_pages == 10


async def test_a_flush_ends_attachments(client: Client, redis: Redis) -> None:
    engine = Engine(client, redis)
    await engine.attach()
    await engine.save(PROMPT, 0, 10)
    await until(lambda: client.service.sessions.manager.stats().host_tier.num_rows == 10)
    await until(lambda: redis.get(SENTINEL_KEY) == TIER.encode())
    await _seen(client)
    redis.flushall()
    await until(lambda: not client.manager.stats().attachments.num_attachments)
    code, details = await code_of(engine.lookup(PROMPT))
    assert code is grpc.StatusCode.ABORTED and details.startswith("lookup.attachment: ")
    await engine.attach()
    assert not (await engine.lookup(PROMPT)).usable_pages


async def _seen(client: Client) -> None:
    """The watch has looked at the sentinel: only then does it notice that it goes."""
    engine = Engine(client)
    await engine.attach(fingerprint=b"s" * 32)
    stack = client.service.sessions.dispatcher._host_keys
    await until(lambda: bool(stack._seen))


async def test_a_dead_redis_opens_the_breaker(client: Client, redis: Redis, server: RedisProcess) -> None:
    engine = Engine(client, redis)
    await engine.attach()
    await engine.save(PROMPT, 0, 10)
    server.kill()
    await until(lambda: client.manager.stats().host_tier.breaker_open)
    found, reserved = await engine.lookup(PROMPT), await engine.reserve(path("ab"))
    assert found.breaker_open and not found.usable_pages and reserved.breaker_open
    server.start()


async def test_a_value_that_redis_dropped_is_a_miss_from_then_on(client: Client, redis: Redis) -> None:
    engine = Engine(client, redis)
    await engine.attach()
    await engine.save(PROMPT, 0, 10)
    found = await engine.lookup(PROMPT)
    redis.delete(keys(found.pages)[3])
    await engine.release(found.lease, 3, MISSING)
    assert (await engine.lookup(PROMPT)).usable_pages == 3
    assert (await client.stub.Stats(cache_pb2.StatsRequest())).host_tier.num_missing_pages == 1


async def test_leases_end_by_themselves() -> None:
    clock = Clock()
    async with started(clock=clock, tick_ms=5, host_lease_s=60) as client:
        engine = Engine(client)
        await engine.attach()
        reserved = await engine.reserve(PROMPT, host_tier_pb2.TierPageRange(num_pages=10))
        written = [host_tier_pb2.WrittenPages(num_pages=10, num_bytes=10 * PAGE_BYTES)]
        await engine.commit(reserved.ticket, written=written)
        lease = (await engine.lookup(PROMPT)).lease
        assert client.manager.stats().attachments.num_leases == 1
        clock.now_ms += 60_000
        await until(lambda: client.manager.stats().attachments.num_expired_leases == 1)
        assert await engine.release(lease, 10) == 0
        audit.check(client.manager)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_lease_ends_whose_caller_has_gone(monkeypatch: pytest.MonkeyPatch, *, is_cancelled: bool) -> None:
    """A long lookup takes longer than its caller waits, and the event loop hears of nothing meanwhile."""
    calls: list[Any] = []
    encode_found = codec.encode_found

    def encode_slowly(found: Found) -> host_tier_pb2.LookupResponse:
        assert found.lease
        if is_cancelled:
            calls[-1].cancel()
        time.sleep(0.3)
        return encode_found(found)

    async with started(tick_ms=5) as client:
        engine = Engine(client)
        await engine.attach()
        reserved = await engine.reserve(PROMPT, host_tier_pb2.TierPageRange(num_pages=10))
        written = [host_tier_pb2.WrittenPages(num_pages=10, num_bytes=10 * PAGE_BYTES)]
        await engine.commit(reserved.ticket, written=written)
        monkeypatch.setattr(codec, "encode_found", encode_slowly)
        request = host_tier_pb2.LookupRequest(**engine.id, path=PROMPT, lease=True)
        for _ in range(3):
            calls.append(engine.stub.Lookup(request, timeout=None if is_cancelled else 0.1))
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await calls[-1]
        await until(lambda: client.manager.stats().attachments.num_leases == 0)
        assert client.manager.stats().attachments.num_expired_leases == 0
        monkeypatch.setattr(codec, "encode_found", encode_found)
        assert await engine.release((await engine.lookup(PROMPT)).lease, 10) == 1, "others keep theirs"
        audit.check(client.manager)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_ticket_ends_whose_caller_has_gone(
    server: RedisProcess, redis: Redis, monkeypatch: pytest.MonkeyPatch, *, is_cancelled: bool
) -> None:
    """Before it was told of the ticket: it cannot be writing. Others may write its pages at once."""
    calls: list[Any] = []
    encode_reserved = codec.encode_reserved

    def encode_slowly(reserved: Reserved) -> host_tier_pb2.ReserveResponse:
        assert reserved.ticket
        if is_cancelled:
            calls[-1].cancel()
        time.sleep(0.3)
        return encode_reserved(reserved)

    redis.set(SENTINEL_KEY, TIER)
    async with started(redis_url=server.url, tick_ms=5, max_open_tickets=2) as client:
        engine, other = Engine(client, redis), Engine(client, redis)
        await engine.attach()
        await other.attach()
        monkeypatch.setattr(codec, "encode_reserved", encode_slowly)
        request = host_tier_pb2.ReserveRequest(**engine.id, path=PROMPT, ranges=[range_of(0, 10)])
        for _ in range(3):
            calls.append(engine.stub.Reserve(request, timeout=None if is_cancelled else 0.1))
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await calls[-1]
        await until(lambda: client.manager.stats().attachments.num_tickets == 0)
        stats = client.manager.stats().attachments
        assert (stats.reserved_pages, stats.given_up_pages, stats.num_expired_tickets) == (30, 30, 0)
        monkeypatch.setattr(codec, "encode_reserved", encode_reserved)
        assert (await other.save(PROMPT, 0, 10)).num_findable == 10
        found = await engine.lookup(PROMPT)
        assert found.usable_pages == 10 and all(redis.mget(keys(found.pages)))
        audit.check(client.manager)


async def test_a_ticket_that_was_told_lasts_though_its_caller_goes(client: Client, redis: Redis) -> None:
    """It may be writing, and nobody can tell it to stop: its pages are neither found nor anybody else's to write."""
    async with grpc.aio.insecure_channel(str(client.service.address)) as channel:
        gone = Engine(client, redis)
        gone.stub = host_tier_pb2_grpc.HostTierStub(channel)
        await gone.attach()
        reserved = await gone.reserve(PROMPT, range_of(0, 10))
    redis.mset(dict.fromkeys(keys(reserved.pages), b"half of them"))
    other = Engine(client, redis)
    await other.attach()
    await asyncio.sleep(0.1)
    assert (await other.lookup(PROMPT)).usable_pages == 0
    assert (await other.reserve(PROMPT, range_of(0, 10))).ticket == 0
    stats = (await client.stub.Stats(cache_pb2.StatsRequest())).attachments
    assert [one.num_tickets for one in stats.engines] == [1, 0], "Stats names the attachment that has it"


async def test_the_oldest_ticket_shows_how_long_it_has_been_open() -> None:
    clock = Clock()
    async with started(clock=clock, tick_ms=5) as client:
        gone, other = Engine(client), Engine(client)
        await gone.attach()
        await other.attach()
        await gone.reserve(PROMPT, range_of(0, 4))
        clock.now_ms += 20_000
        await gone.reserve(PROMPT, range_of(4, 8))
        ticket = (await other.reserve(PROMPT, range_of(8, 10))).ticket
        clock.now_ms += 10_000

        async def told() -> list[int]:
            stats = (await client.stub.Stats(cache_pb2.StatsRequest())).attachments
            return [stats.oldest_ticket_ms, *[one.oldest_ticket_ms for one in stats.engines]]

        await until(lambda: client.manager.stats().attachments.oldest_ticket_ms == 30_000)
        assert await told() == [30_000, 30_000, 10_000]
        await other.commit(ticket)
        assert await told() == [30_000, 30_000, 0]
        sample = client.service.registry.get_sample_value
        assert sample("stemcache_cache_attached_oldest_ticket_ms") == 30_000
        clock.now_ms += 90_000
        await until(lambda: client.manager.stats().attachments.oldest_ticket_ms == 100_000)
        clock.now_ms += 20_000
        await until(lambda: client.manager.stats().attachments.oldest_ticket_ms == 0)


# Bad input.

BAD_ATTACHES: list[tuple[str, dict[str, Any]]] = [
    ("protocol_version", {"protocol_version": 2}),
    ("engine", {"engine": ""}),
    ("engine", {"engine": "e" * 300}),
    ("fingerprint", {"fingerprint": b"f" * 31}),
    ("model", {"model": ""}),
    ("page_tokens", {"page_tokens": 0}),
    ("page_tokens", {"page_tokens": 2**32 - 1}),
    ("groups", {"groups": []}),
    ("groups", {"groups": [FULL] * 2}),
    ("groups[0].kind", {"groups": [host_tier_pb2.TierGroup(name="g", page_bytes=1)]}),
    ("groups[0].name", {"groups": [host_tier_pb2.TierGroup(kind=types_pb2.GROUP_KIND_FULL, page_bytes=1)]}),
    ("groups[0].page_bytes", {"groups": [host_tier_pb2.TierGroup(name="g", kind=types_pb2.GROUP_KIND_FULL)]}),
    (
        "groups[0].window_tokens",
        {"groups": [host_tier_pb2.TierGroup(name="g", kind=types_pb2.GROUP_KIND_WINDOW, page_bytes=1)]},
    ),
    ("num_ranks", {"num_ranks": 0}),
    ("num_ranks", {"num_ranks": 5_000}),
    ("host_tier_id", {"host_tier_id": ""}),
]


@pytest.mark.parametrize(("field", "fields"), BAD_ATTACHES)
async def test_a_bad_attach(field: str, fields: dict[str, Any]) -> None:
    async with started() as client:
        code, details = await code_of(Engine(client).attach(**fields))
        assert code in (grpc.StatusCode.INVALID_ARGUMENT,) and details.startswith(f"attach.{field}: "), details
        assert not client.manager.attachments.all and not client.manager.tiers.named()


CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("Lookup", "lookup.epoch", {"epoch": ""}),
    ("Lookup", "lookup.path.page_ids", {"path": host_tier_pb2.TierPath(page_ids=b"x" * 33)}),
    ("Lookup", "lookup.path.tokens", {"path": host_tier_pb2.TierPath(tokens=b"x" * 5)}),
    ("Lookup", "lookup.path", {"path": host_tier_pb2.TierPath(tokens=b"x" * 4, page_ids=b"x" * 32)}),
    ("Lookup", "lookup.path.salt", {"path": host_tier_pb2.TierPath(salt="s" * 300)}),
    ("Lookup", "lookup.local_pages", {"path": PROMPT, "local_pages": 11}),
    (
        "Reserve",
        "reserve.ranges[0].group",
        {"path": PROMPT, "ranges": [host_tier_pb2.TierPageRange(group=1, num_pages=1)]},
    ),
    ("Reserve", "reserve.ranges[0].num_pages", {"path": PROMPT, "ranges": [host_tier_pb2.TierPageRange(num_pages=11)]}),
    ("Commit", "commit.status", {"ticket": 1}),
    ("Commit", "commit.ticket", {"ticket": 1, "status": cache_pb2.TRANSFER_STATUS_DONE}),
    ("Release", "release.ends[0].status", {"ends": [host_tier_pb2.LeaseEnd(lease=1)]}),
    (
        "Release",
        "release.ends[0].lease",
        {"ends": [host_tier_pb2.LeaseEnd(lease=1, status=cache_pb2.TRANSFER_STATUS_DONE)]},
    ),
]


@pytest.mark.parametrize(("call", "field", "fields"), CALLS)
async def test_a_bad_call(call: str, field: str, fields: dict[str, Any]) -> None:
    async with started() as client:
        engine = Engine(client)
        await engine.attach()
        request = getattr(host_tier_pb2, f"{call}Request")(**{**engine.id, **fields})
        code, details = await code_of(getattr(engine.stub, call)(request))
        assert (code, details.startswith(f"{field}: ")) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
        audit.check(client.manager)


async def test_more_than_the_limits() -> None:
    async with started(max_attachments=1) as client:
        engine = Engine(client)
        limits = (await engine.attach()).limits
        code, details = await code_of(Engine(client).attach())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and details.startswith("attach: ")
        too_long = host_tier_pb2.TierPath(page_ids=bytes(32 * (limits.max_pages + 1)))
        code, details = await code_of(engine.lookup(too_long))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and details.startswith("lookup.path.page_ids: ")
