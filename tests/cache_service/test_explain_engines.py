"""Explain by page ids over real gRPC, with the real manager and a real Redis; and what it refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from redis import Redis

from protos.v1 import cache_pb2, host_tier_pb2, types_pb2
from session.protocol import SENTINEL_KEY
from tests.cache_service.engine import CORRUPT, FULL, PAGE_BYTES, STATE, TIER, WINDOW, Engine, keys, path
from tests.cache_service.peer import Client, Clock, started
from tests.cache_service.test_host_keys import redis, server
from tests.redis_process import RedisProcess
from tests.rpc.echo import code_of
from tests.session.messages import acquire, namespace, publish, release, tokens

__all__ = ["redis", "server"]

PROMPT = path(range(10))
MODEL = types_pb2.Namespace(model="model")


@pytest.fixture
async def client(server: RedisProcess, redis: Redis) -> AsyncIterator[Client]:
    redis.set(SENTINEL_KEY, TIER)
    async with started(redis_url=server.url, tick_ms=10) as client:
        yield client


async def explain(client: Client, **fields: Any) -> Any:
    return await client.stub.Explain(cache_pb2.ExplainRequest(**fields))


async def test_each_group_of_each_engine_says_what_it_has(client: Client, redis: Redis) -> None:
    hybrid, plain = Engine(client, redis), Engine(client, redis)
    await hybrid.attach(groups=[FULL, WINDOW, STATE], engine="vllm")
    await plain.attach(engine="sglang")
    await hybrid.save(PROMPT, 0, 8, 0)
    await hybrid.save(PROMPT, 0, 7, 1)
    await hybrid.save(PROMPT, 4, 5, 2)
    told = (await explain(client, namespace=MODEL, page_ids=PROMPT.page_ids)).attachments
    assert [(one.attachment, one.engine, one.num_pages, one.page_tokens) for one in told] == [
        (1, "vllm", 10, 16),
        (2, "sglang", 10, 16),
    ]
    assert [(one.matched_pages, one.usable_pages, one.usable_tokens) for one in told] == [(8, 5, 80), (0, 0, 0)]
    assert (told[0].limiting_group, told[0].miss_reason) == ("window", types_pb2.MISS_REASON_WINDOW_GONE)
    rows = [(one.name, one.leading_pages, one.resident_pages, one.usable_pages) for one in told[0].groups]
    assert rows == [("full", 8, 8, 8), ("window", 7, 7, 7), ("state", 0, 1, 5)]
    assert [one.missing_page for one in told[0].groups] == [8, 7, 5]
    assert [one.kind for one in told[0].groups] == [1, 2, 3]
    assert told[1].miss_reason == types_pb2.MISS_REASON_NEVER_SEEN and "attachment 1" in told[1].notes[-1]
    found = await hybrid.lookup(PROMPT, lease=False)
    assert (found.usable_pages, found.limiting_group) == (told[0].usable_pages, told[0].limiting_group)


async def test_a_lookup_that_missed_is_explained_without_page_ids() -> None:
    clock = Clock()
    async with started(clock=clock) as client:
        engine = Engine(client)
        await engine.attach()
        await engine.lookup(path("salted", salt="tenant"), local=2)
        clock.now_ms += 1_500
        (told,) = (await explain(client, attachment=1)).attachments
        assert (told.num_pages, told.local_pages, told.lookup_age_ms) == (6, 2, 1_500)
        assert not (await explain(client, attachment=1)).workers
        by_ids = (await explain(client, attachment=1, page_ids=PROMPT.page_ids)).attachments[0]
        assert not by_ids.HasField("lookup_age_ms") and by_ids.groups[0].missing_page == 0
        assert by_ids.groups[0].HasField("missing_page")


async def test_damaged_and_refused_pages_say_so(server: RedisProcess, redis: Redis) -> None:
    redis.set(SENTINEL_KEY, TIER)
    async with started(redis_url=server.url, tick_ms=10, host_quota_mb=1) as client:
        engine = Engine(client, redis)
        large = host_tier_pb2.TierGroup(name="full", kind=types_pb2.GROUP_KIND_FULL, page_bytes=1 << 18)
        await engine.attach(groups=[large])
        reserved = await engine.reserve(path("abcd"), host_tier_pb2.TierPageRange(num_pages=4))
        redis.mset(dict.fromkeys(keys(reserved.pages), b"v"))
        await engine.commit(reserved.ticket, written=[host_tier_pb2.WrittenPages(num_pages=4, num_bytes=4 << 18)])
        lease = (await engine.lookup(path("abcd"))).lease
        assert (await engine.reserve(PROMPT, host_tier_pb2.TierPageRange(num_pages=2))).num_refused == 2
        refused = (await explain(client, namespace=MODEL, page_ids=PROMPT.page_ids)).attachments[0]
        assert refused.groups[0].miss_reason == types_pb2.MISS_REASON_REFUSED
        await engine.release(lease, 1, CORRUPT)
        damaged = (await explain(client, namespace=MODEL, page_ids=path("abcd").page_ids)).attachments[0]
        assert (damaged.usable_pages, damaged.miss_reason) == (1, types_pb2.MISS_REASON_DAMAGED)


async def test_prompts_are_explained_as_before(client: Client) -> None:
    engine = Engine(client)
    await engine.attach(model="model")
    peer = await client.connected()
    await peer.step(acquires=[acquire(1, tokens(40))])
    await peer.step(publishes=[publish(1, 40)], releases=[release(1)])
    told = await explain(client, namespace=namespace(), tokens=tokens(40))
    assert not told.attachments and [one.match.usable_tokens for one in told.workers] == [32]


BAD: list[tuple[str, grpc.StatusCode, dict[str, Any]]] = [
    ("page_ids", grpc.StatusCode.INVALID_ARGUMENT, {"page_ids": b"x" * 33}),
    ("page_ids", grpc.StatusCode.INVALID_ARGUMENT, {"page_ids": b"x" * 32, "tokens": b"x" * 4}),
    ("page_ids", grpc.StatusCode.RESOURCE_EXHAUSTED, {"page_ids": bytes(32 * 16_385)}),
    ("page_ids", grpc.StatusCode.INVALID_ARGUMENT, {"attachment": 1, "namespace": None}),
    ("tokens", grpc.StatusCode.INVALID_ARGUMENT, {"tokens": b"x" * 5, "attachment": 1}),
    ("tokens", grpc.StatusCode.INVALID_ARGUMENT, {}),
    ("worker_id", grpc.StatusCode.INVALID_ARGUMENT, {"page_ids": b"x" * 32, "worker_id": "w1"}),
    ("attachment", grpc.StatusCode.NOT_FOUND, {"page_ids": b"x" * 32, "attachment": 7}),
    ("namespace", grpc.StatusCode.INVALID_ARGUMENT, {"page_ids": b"x" * 32, "namespace": None}),
    ("namespace", grpc.StatusCode.INVALID_ARGUMENT, {"attachment": 1}),
    (
        "namespace.model",
        grpc.StatusCode.NOT_FOUND,
        {"page_ids": b"x" * 32, "namespace": types_pb2.Namespace(model="another")},
    ),
    (
        "namespace.model",
        grpc.StatusCode.INVALID_ARGUMENT,
        {"page_ids": b"x" * 32, "attachment": 1, "namespace": types_pb2.Namespace(model="another")},
    ),
    ("namespace.model", grpc.StatusCode.INVALID_ARGUMENT, {"page_ids": b"x" * 32, "namespace": types_pb2.Namespace()}),
    (
        "namespace.salt",
        grpc.StatusCode.INVALID_ARGUMENT,
        {"page_ids": b"x" * 32, "attachment": 1, "namespace": types_pb2.Namespace(salt="s" * 300)},
    ),
]


@pytest.mark.parametrize(("field", "code", "fields"), BAD)
async def test_bad_questions(field: str, code: grpc.StatusCode, fields: dict[str, Any]) -> None:
    async with started() as client:
        await Engine(client).attach()
        found, details = await code_of(explain(client, **{"namespace": MODEL, **fields}))
        assert (found, details.startswith(f"request.{field}: ")) == (code, True), (found, details)


async def test_the_longest_path_is_answered_in_slices() -> None:
    async with started() as client:
        engine = Engine(client)
        await engine.attach(groups=[FULL, WINDOW, STATE])
        longest = path(range(16_384))
        reserved = await engine.reserve(longest, host_tier_pb2.TierPageRange(num_pages=16_384))
        written = [host_tier_pb2.WrittenPages(num_pages=16_384, num_bytes=16_384 * PAGE_BYTES)]
        await engine.commit(reserved.ticket, written=written)
        (told,) = (await explain(client, namespace=MODEL, page_ids=longest.page_ids)).attachments
        assert (told.matched_pages, told.usable_pages) == (16_384, 0)
        assert [one.leading_pages for one in told.groups] == [16_384, 0, 0]
