"""Random bytes, and random well-formed nonsense, to every call: the service answers, lives, and its books balance."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Coroutine
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.v1 import cache_pb2, host_tier_pb2, types_pb2
from tests.cache_service import engine
from tests.cache_service.peer import Client, Peer, started
from tests.cache_service.test_bad_input import METHODS, raw_call
from tests.core import audit
from tests.core.snapshot import snapshot
from tests.examples import examples
from tests.session.messages import MODEL, PAGE, acquire, hello, hybrid_hello, publish, release, tokens, u32, u64

ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}
EXAMPLES = settings(max_examples=examples(40))


async def answer(asked: Coroutine[Any, Any, Any]) -> grpc.StatusCode:
    try:
        await asked
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_random_bytes_to_every_call() -> None:
    dice = random.Random(4)
    async with started() as client:
        peer = await client.connected()
        await peer.step(acquires=[acquire(7, tokens(40))])
        before = snapshot(client.manager)
        for method in METHODS:
            for _ in range(40):
                code = await answer(raw_call(client, method, dice.randbytes(dice.randrange(1, 200))))
                assert code in ALLOWED, (method, code)
        audit.check(client.manager)
        assert snapshot(client.manager) == before
        await peer.step(publishes=[publish(7, 40)], releases=[release(7)])


# Small numbers meet each other often; the others are the edges of their fields.
SMALL = st.one_of(st.integers(0, 6), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1]))
IDS = st.one_of(st.integers(0, 4), st.just(2**64 - 1))
COUNTS = st.one_of(st.integers(0, 80), st.sampled_from([2**31, 2**32 - 1]))
TOKENS = st.one_of(
    st.builds(tokens, st.integers(0, 70), st.integers(0, 2)), st.binary(max_size=40), st.just(b"\xff" * 64)
)
NAMESPACES = st.one_of(
    st.none(),
    st.builds(types_pb2.Namespace, model=st.sampled_from(["", MODEL]), salt=st.sampled_from(["", "s", "ü" * 300])),
)
REASONS = st.integers(0, 4)
ACKS = st.builds(cache_pb2.Ack, ticket=IDS, num_done=SMALL, status=REASONS, num_bytes=IDS, seconds=st.floats(width=64))
PUBLISHES = st.builds(cache_pb2.Publish, sequence_id=IDS, tokens=TOKENS, computed_tokens=COUNTS)
RELEASES = st.builds(
    cache_pb2.Release, sequence_id=IDS, reason=REASONS, rolling_tokens=st.one_of(st.just(0), st.just(PAGE), COUNTS)
)
EXTENDS = st.builds(
    lambda pairs, spare: cache_pb2.Extends(
        sequence_ids=u64(pair[0] for pair in pairs), num_tokens=u32(pair[1] for pair in pairs) + spare
    ),
    st.lists(st.tuples(IDS, COUNTS), max_size=3),
    st.sampled_from([b"", b"", b"", b"\1", b"\1\0\0\0"]),
)
ACQUIRES = st.builds(
    cache_pb2.Acquire,
    sequence_id=IDS,
    namespace=NAMESPACES,
    tokens=TOKENS,
    reserve_pages=SMALL,
    chunk_tokens=COUNTS,
    priority=st.integers(-(2**31), 2**31 - 1),
    kept_tokens=st.one_of(st.just(0), COUNTS),
    bypass_cache=st.booleans(),
)
PAGES = st.builds(types_pb2.GroupPages, group=SMALL, first_page=SMALL, page_ids=st.lists(SMALL, max_size=6).map(u32))
SLOTS = st.builds(types_pb2.SnapshotSlot, group=SMALL, boundary_tokens=COUNTS, slot=SMALL)
ADOPTS = st.builds(
    cache_pb2.Adopt,
    sequence_id=IDS,
    namespace=NAMESPACES,
    tokens=TOKENS,
    computed_tokens=COUNTS,
    tables=st.lists(PAGES, max_size=2),
    working=st.lists(SLOTS, max_size=1),
    rolling=st.lists(SLOTS, max_size=1),
    priority=st.integers(-(2**31), 2**31 - 1),
)
STEPS = st.builds(
    cache_pb2.Step,
    step_id=st.integers(0, 9),
    acks=st.lists(ACKS, max_size=1),
    publishes=st.lists(PUBLISHES, max_size=2),
    releases=st.lists(RELEASES, max_size=2),
    extends=st.one_of(st.none(), EXTENDS),
    adopts=st.lists(ADOPTS, max_size=2),
    acquires=st.lists(ACQUIRES, max_size=3),
    rates=st.one_of(
        st.none(),
        st.builds(
            cache_pb2.Rates,
            prefill_tokens_per_s=st.floats(),
            fetch_bytes_per_s=st.floats(),
            spill_bytes_per_s=st.floats(),
        ),
    ),
)
MESSAGES = st.one_of(
    st.builds(lambda step: cache_pb2.WorkerMessage(step=step), STEPS),
    st.builds(lambda step: cache_pb2.WorkerMessage(step=step), STEPS),
    st.just(cache_pb2.WorkerMessage()),
)


HELLOS = {"one FULL group": hello(num_pages=24), "all kinds and a host tier": hybrid_hello()}


async def good_start(client: Client, greeting: cache_pb2.Hello) -> Peer:
    """Something to collide with: sequence 1 half done, a published prompt, ids and step ids in use, perhaps tickets."""
    peer = client.peer()
    await peer.send(hello=greeting)
    peer.generation = (await peer.receive()).welcome.generation
    await peer.step(acquires=[acquire(1, tokens(40)), acquire(2, tokens(40, 50))])
    await peer.step(publishes=[publish(1, 20), publish(2, 40)], releases=[release(2)])
    return peer


async def converse(client: Client, greeting: cache_pb2.Hello, messages: list[cache_pb2.WorkerMessage]) -> None:
    peer = await good_start(client, greeting)
    going_on = cache_pb2.Hello()
    going_on.CopyFrom(greeting)
    going_on.generation = peer.generation
    for number, request in enumerate(messages):
        if request.HasField("step") and request.step.step_id > 2:
            request.step.step_id = number + 3
        before = snapshot(client.manager)
        body = request.SerializeToString()
        await peer.stream.write(cache_pb2.SessionRequest(body=body, crc32=zlib.crc32(body)))
        try:
            assert await peer.answer() is not grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            assert error.code() in ALLOWED, (error, request)
            assert snapshot(client.manager) == before, request
            peer = client.peer()
            await peer.send(hello=going_on)
            assert (await peer.answer()).welcome.generation == going_on.generation
        audit.check(client.manager)
    await peer.hang_up()


@pytest.mark.parametrize("greeting", HELLOS.values(), ids=HELLOS)
@given(st.lists(MESSAGES, min_size=1, max_size=8))
@EXAMPLES
def test_well_formed_nonsense_in_a_session(greeting: cache_pb2.Hello, messages: list[cache_pb2.WorkerMessage]) -> None:
    async def main() -> None:
        async with started(max_sequence_tokens=PAGE * 4 + 10, spill="write_through", tick_ms=60_000) as client:
            await converse(client, greeting, messages)

    asyncio.run(main())


QUESTIONS = st.one_of(
    *(
        st.builds(kind, namespace=NAMESPACES, tokens=TOKENS, worker_id=st.sampled_from(["", "w1", "w2"]))
        for kind in (cache_pb2.MatchRequest, cache_pb2.ExplainRequest)
    ),
    st.builds(
        cache_pb2.ExplainRequest,
        namespace=st.one_of(st.none(), NAMESPACES),
        page_ids=st.sampled_from([b"", b"i" * 31, b"i" * 64]),
        attachment=SMALL,
    ),
    st.builds(cache_pb2.PinRequest, namespace=NAMESPACES, tokens=TOKENS, ttl_ms=IDS),
    st.builds(cache_pb2.ClearRequest, namespace=NAMESPACES, unused_only=st.booleans()),
)


@given(st.lists(QUESTIONS, min_size=1, max_size=12))
@EXAMPLES
def test_well_formed_nonsense_in_questions(questions: list[Any]) -> None:
    async def main() -> None:
        async with started() as client:
            peer = await good_start(client, HELLOS["all kinds and a host tier"])
            for question in questions:
                before = snapshot(client.manager)
                method = type(question).__name__.removesuffix("Request")
                stub = client.admin if method in ("Pin", "Clear") else client.stub
                code = await answer(getattr(stub, method)(question))
                assert code in ALLOWED, (code, question)
                if code is not grpc.StatusCode.OK or method in ("Match", "Explain"):
                    assert snapshot(client.manager) == before, question
                audit.check(client.manager)
            await peer.step()

    asyncio.run(main())


PATHS = st.one_of(
    st.none(),
    st.builds(engine.path, st.text("xy", max_size=5), st.sampled_from(["", "s", "ü" * 300])),
    st.builds(host_tier_pb2.TierPath, tokens=TOKENS, page_ids=st.sampled_from([b"", b"", b"i" * 32])),
)
RANGES = st.builds(host_tier_pb2.TierPageRange, group=SMALL, first_page=SMALL, num_pages=SMALL)
WRITTEN = st.builds(
    lambda group, count, spare: host_tier_pb2.WrittenPages(
        group=group, num_pages=count, num_bytes=count * engine.PAGE_BYTES + spare
    ),
    SMALL,
    SMALL,
    st.sampled_from([0, 0, 0, 1]),
)
ENDS = st.builds(host_tier_pb2.LeaseEnd, lease=IDS, status=REASONS, num_pages=SMALL)
ATTACHED_CALLS = st.one_of(
    st.builds(host_tier_pb2.LookupRequest, path=PATHS, local_pages=SMALL, lease=st.booleans()),
    st.builds(host_tier_pb2.ReserveRequest, path=PATHS, ranges=st.lists(RANGES, max_size=3)),
    st.builds(
        host_tier_pb2.CommitRequest, ticket=IDS, rank=SMALL, status=REASONS, written=st.lists(WRITTEN, max_size=2)
    ),
    st.builds(host_tier_pb2.ReleaseRequest, ends=st.lists(ENDS, max_size=3)),
)


@given(st.lists(st.tuples(ATTACHED_CALLS, st.sampled_from([0, 0, 0, 0, 1])), min_size=1, max_size=12))
@EXAMPLES
def test_well_formed_nonsense_of_an_attached_engine(calls: list[tuple[Any, int]]) -> None:
    """Sound calls stand among it, so leases and tickets are there to collide with; what is refused changed nothing."""

    async def main() -> None:
        async with started(host_quota_mb=1, max_open_tickets=3, tick_ms=60_000) as client:
            attached = engine.Engine(client)
            await attached.attach(groups=[engine.FULL, engine.STATE])
            reserved = await attached.reserve(engine.path("xyx"), engine.range_of(0, 3), engine.range_of(2, 3, 1))
            await attached.commit(reserved.ticket, written=attached.written(reserved))
            assert (await attached.lookup(engine.path("xyx"))).usable_pages == 3
            await attached.reserve(engine.path("yyy"), engine.range_of(0, 3))
            for request, stranger in calls:
                request.epoch, request.attachment = attached.attached.epoch, attached.attached.attachment + stranger
                before = snapshot(client.manager)
                call = type(request).__name__.removesuffix("Request")
                code = await answer(getattr(attached.stub, call)(request))
                assert code in ALLOWED, (code, request)
                if code is not grpc.StatusCode.OK:
                    assert snapshot(client.manager) == before, request
                audit.check(client.manager)
                before = snapshot(client.manager)
                for page_ids in (b"", engine.path("xyxy").page_ids):
                    asked = cache_pb2.ExplainRequest(attachment=request.attachment, page_ids=page_ids)
                    assert await answer(client.stub.Explain(asked)) in ALLOWED
                assert snapshot(client.manager) == before
            client.manager.host_lost(engine.TIER)
            audit.check(client.manager)
            index = client.manager.tiers.shared[engine.TIER]
            assert (index.quota.num_held, index.quota.reserved_bytes, index.pending) == (0, 0, {})

    asyncio.run(main())


@pytest.mark.parametrize("call", ["Attach", "Lookup", "Reserve", "Commit", "Release"])
async def test_random_fields_of_an_attached_engine(call: str) -> None:
    """A request whose bytes were changed at random, but for the attachment that it names."""
    dice = random.Random(call)
    async with started(tick_ms=60_000, max_attachments=64) as client:
        attached = engine.Engine(client)
        await attached.attach(groups=[engine.FULL, engine.STATE])
        whole = {
            "Attach": engine.attach_request(),
            "Lookup": host_tier_pb2.LookupRequest(**attached.id, path=engine.path("xyz"), lease=True),
            "Reserve": host_tier_pb2.ReserveRequest(
                **attached.id, path=engine.path("xyz"), ranges=[engine.range_of(0, 3)]
            ),
            "Commit": host_tier_pb2.CommitRequest(**attached.id, ticket=1, status=engine.DONE),
            "Release": host_tier_pb2.ReleaseRequest(**attached.id, ends=[host_tier_pb2.LeaseEnd(lease=1, status=1)]),
        }[call].SerializeToString()
        for _ in range(150):
            raw = bytearray(whole)
            for _ in range(dice.randrange(1, 4)):
                raw[dice.randrange(len(raw))] = dice.randrange(256)
            code = await answer(raw_call(client, call, bytes(raw)))
            assert code in ALLOWED, (code, bytes(raw))
        audit.check(client.manager)
        assert (await attached.lookup(engine.path("abc"))).miss_reason == types_pb2.MISS_REASON_NEVER_SEEN
