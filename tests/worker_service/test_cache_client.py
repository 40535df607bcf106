"""The client against a scripted cache service on loopback: answers, orders, and every way to lose a stream."""

from __future__ import annotations

import asyncio
import struct
import zlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from protos.v1 import cache_pb2, cache_pb2_grpc, types_pb2
from rpc.client import open_channel
from session.messages import Ack, Acquire, Adopt, Extend, ExtendGrant, Publish, Rates, Release, Step
from session.words import (
    GroupKind,
    GroupPages,
    GroupSpec,
    HostTierKind,
    Namespace,
    RefusalReason,
    ReleaseReason,
    SequenceId,
    SnapshotSlot,
    TicketId,
    TransferStatus,
)
from worker_service.cache_client import CacheClient, ClientLimits, CurrentFacts, WorkerFacts
from worker_service.core.errors import SessionLost, SessionRefused

GROUPS = (
    GroupSpec("full", GroupKind.FULL, 13, 64),
    GroupSpec("window", GroupKind.WINDOW, 9, 32, 8),
    GroupSpec("state", GroupKind.STATE, 6, 32),
)
FACTS = WorkerFacts("w", "incarnation-1", b"f" * 32, 4, GROUPS, "model-1")
WHEREABOUTS = CurrentFacts("127.0.0.1:1", HostTierKind.SHARED, "tier-1")
LIMITS = cache_pb2.SessionLimits(
    max_sequence_tokens=400,
    max_live_sequences=2,
    max_step_items=3,
    max_message_bytes=2**40,
    max_name_chars=5,
    max_adopt_pages=6,
    max_kept_bytes=7,
    grace_ms=8,
)
WELCOME = cache_pb2.ManagerMessage(
    welcome=cache_pb2.Welcome(epoch="e", generation=9, last_step_id=4, limits=LIMITS, capabilities=["one", "two"])
)
Script = Callable[[AsyncIterator[cache_pb2.SessionRequest], grpc.aio.ServicerContext], Awaitable[None]]


def seal(message: cache_pb2.ManagerMessage) -> cache_pb2.SessionResponse:
    body = message.SerializeToString()
    return cache_pb2.SessionResponse(body=body, crc32=zlib.crc32(body))


async def hear(requests) -> cache_pb2.WorkerMessage:
    request = await anext(requests)
    assert zlib.crc32(request.body) == request.crc32
    return cache_pb2.WorkerMessage.FromString(request.body)


def u32(*numbers: int) -> bytes:
    return array("I", numbers).tobytes()


def step_reply(step_id: int, **fields: object) -> cache_pb2.SessionResponse:
    return seal(cache_pb2.ManagerMessage(step_reply=cache_pb2.StepReply(step_id=step_id, **fields)))  # type: ignore[arg-type]


class Scripted(cache_pb2_grpc.PrefixCacheServicer):
    """Plays one script for each stream; the last one again and again."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.num_streams = 0

    async def Session(self, request_iterator, context):  # noqa: N802
        script = self.scripts[min(self.num_streams, len(self.scripts) - 1)]
        self.num_streams += 1
        await script(request_iterator, context)


@asynccontextmanager
async def session(*scripts: Script, limits: ClientLimits | None = None):
    server = grpc.aio.server()
    servicer = Scripted(*scripts)
    cache_pb2_grpc.add_PrefixCacheServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    limits = limits or ClientLimits(reply_timeout_s=20, backoff_min_s=0.001, backoff_max_s=0.01)
    client = CacheClient(lambda: open_channel(f"127.0.0.1:{port}"), FACTS, lambda: WHEREABOUTS, limits)
    try:
        yield client, servicer
    finally:
        await client.close()
        await server.stop(0)


async def welcoming(requests, context) -> cache_pb2.Hello:
    message = await hear(requests)
    await context.write(seal(WELCOME))
    return message.hello


async def silent(requests, context) -> None:
    await welcoming(requests, context)
    async for _ in requests:
        pass


async def test_hello_says_who_the_worker_is_and_the_welcome_is_understood() -> None:
    seen: list[cache_pb2.Hello] = []

    async def script(requests, context) -> None:
        seen.append(await welcoming(requests, context))
        await anext(requests)

    async with session(script) as (client, _):
        welcome = await client.connect(8)
        assert welcome == ("e", 9, 4, (400, 2, 3, 2**40, 5, 6, 7, 8), ("one", "two"))
    hello = seen[0]
    assert (hello.protocol_version, hello.worker_id, hello.incarnation) == (2, "w", "incarnation-1")
    assert (hello.endpoint, hello.host_tier, hello.host_tier_id) == ("127.0.0.1:1", 3, "tier-1")
    assert (hello.fingerprint, hello.page_tokens, hello.num_ranks) == (b"f" * 32, 4, 1)
    assert (hello.model, hello.generation) == ("model-1", 8)
    assert [(g.name, g.kind, g.num_pages, g.page_bytes, g.window_tokens) for g in hello.groups] == [
        ("full", 1, 13, 64, 0),
        ("window", 2, 9, 32, 8),
        ("state", 3, 6, 32, 0),
    ]


async def test_every_word_of_a_step_and_its_reply_comes_across() -> None:
    seen: list[cache_pb2.Step] = []
    moved = types_pb2.TransferPages(group=0, page_ids=u32(5), key_prefix="k:", page_hashes=bytes(32))
    fetches = [types_pb2.Transfer(ticket=8 + n, groups=[moved], first_page=1 + n, num_pages=1) for n in range(2)]
    grant = types_pb2.Grant(
        sequence_id=1,
        usable_tokens=8,
        cached_tokens=4,
        fetched_tokens=4,
        tables=[types_pb2.GroupPages(group=1, first_page=2, page_ids=u32(7))],
        fetches=fetches,
        restore=[types_pb2.SnapshotSlot(group=2, boundary_tokens=8, slot=3)],
        match=types_pb2.MatchResult(matched_tokens=9, usable_tokens=8, limiting_group="window", miss_reason=6),
    )
    extends = cache_pb2.ExtendGrants(
        sequence_ids=struct.pack("<2Q", 4, 5),
        first_pages=u32(1, 1, 0, 9, 0, 0),
        num_pages=u32(2, 0, 0, 1, 0, 0),
        page_ids=u32(11, 12, 13),
        snapshots=[cache_pb2.SequenceSnapshots(sequence_id=5, leave=[types_pb2.SnapshotSlot(group=2, slot=6)])],
    )

    async def script(requests, context) -> None:
        await welcoming(requests, context)
        seen.append((await hear(requests)).step)
        await context.write(
            step_reply(
                7,
                grants=[grant],
                extends=extends,
                refusals=[types_pb2.Refusal(sequence_id=6, reason=3, detail="odd", field="step.acquires[0].tokens")],
                remaps=[cache_pb2.Remap(sequence_id=4, pages=[types_pb2.GroupPages(first_page=1, page_ids=u32(2))])],
            )
        )
        await anext(requests)

    step = Step(
        7,
        (Ack(TicketId(1), 2, TransferStatus.MISSING, 3, 0.5),),
        (Publish(SequenceId(1), b"\1\0\0\0", 5),),
        (Release(SequenceId(2), ReleaseReason.FINISHED, 12),),
        (
            Adopt(
                SequenceId(7),
                Namespace("m", "a", "t"),
                b"\3\0\0\0",
                1,
                (GroupPages(0, 0, u32(4)),),
                (SnapshotSlot(2, 4, 5),),
                (SnapshotSlot(2, 8, 6),),
                2,
                True,
            ),
        ),
        (Extend(SequenceId(4), 40), Extend(SequenceId(5), 50)),
        (Acquire(SequenceId(6), Namespace("m", "a", "s"), b"\2\0\0\0", 3, 4, -5, 6, True),),
        Rates(1.5, 2.5),
    )
    async with session(script) as (client, _):
        await client.connect(0)
        reply = await client.step(step)
    sent = seen[0]
    assert (sent.acks[0].ticket, sent.acks[0].num_done, sent.acks[0].status) == (1, 2, 2)
    assert (sent.acks[0].num_bytes, sent.acks[0].seconds) == (3, 0.5)
    assert (sent.publishes[0].tokens, sent.publishes[0].computed_tokens) == (b"\1\0\0\0", 5)
    assert (sent.releases[0].sequence_id, sent.releases[0].reason, sent.releases[0].rolling_tokens) == (2, 1, 12)
    adopt = sent.adopts[0]
    assert (adopt.sequence_id, adopt.namespace.salt, adopt.tokens, adopt.computed_tokens) == (7, "t", b"\3\0\0\0", 1)
    assert (adopt.tables[0].page_ids, adopt.priority, adopt.bypass_cache) == (u32(4), 2, True)
    assert [(slot.group, slot.boundary_tokens, slot.slot) for slot in adopt.working] == [(2, 4, 5)]
    assert [(slot.group, slot.boundary_tokens, slot.slot) for slot in adopt.rolling] == [(2, 8, 6)]
    assert sent.extends.sequence_ids == struct.pack("<2Q", 4, 5)
    assert sent.extends.num_tokens == u32(40, 50)
    acquire = sent.acquires[0]
    assert (acquire.namespace.model, acquire.namespace.adapter, acquire.namespace.salt) == ("m", "a", "s")
    assert (acquire.tokens, acquire.reserve_pages, acquire.chunk_tokens, acquire.priority) == (b"\2\0\0\0", 3, 4, -5)
    assert (acquire.kept_tokens, acquire.bypass_cache) == (6, True)
    assert (sent.rates.prefill_tokens_per_s, sent.rates.fetch_bytes_per_s) == (1.5, 2.5)
    assert reply.grants[0].tables == (GroupPages(1, 2, u32(7)),)
    pages = ((0, u32(5), "k:", bytes(32)),)
    assert reply.grants[0].fetches == ((8, pages, 1, 1), (9, pages, 2, 1))
    assert reply.grants[0].restore == ((2, 8, 3),)
    assert reply.grants[0].match == (9, 8, 0, "window", 6)
    assert reply.extends == (
        ExtendGrant(SequenceId(4), (GroupPages(0, 1, u32(11, 12)),)),
        ExtendGrant(SequenceId(5), (GroupPages(0, 9, u32(13)),), ((2, 0, 6),)),  # type: ignore[arg-type]
    )
    assert reply.refusals == ((6, RefusalReason.INVALID, "odd", "step.acquires[0].tokens"),)
    assert reply.remaps == ((4, (GroupPages(0, 1, u32(2)),)),)


async def test_orders_arrive_between_replies_in_their_order() -> None:
    async def script(requests, context) -> None:
        await welcoming(requests, context)
        for ticket in (1, 2):
            await context.write(order(ticket))
        await context.write(step_reply((await hear(requests)).step.step_id))
        await context.write(order(3))
        await anext(requests)

    async with session(script) as (client, _):
        await client.connect(0)
        assert (await client.step(Step(1))).step_id == 1
        assert [(await client.next_order()).ticket for _ in range(3)] == [1, 2, 3]


def order(ticket: int, num_pages: int = 2, last_page: int = 6) -> cache_pb2.SessionResponse:
    pages = types_pb2.TransferPages(group=0, page_ids=u32(5, last_page), key_prefix="k:", page_hashes=bytes(64))
    transfer = types_pb2.Transfer(ticket=ticket, groups=[pages], num_pages=num_pages)
    return seal(cache_pb2.ManagerMessage(order=cache_pb2.Order(spill=transfer)))


async def ends(requests, context) -> None:
    await welcoming(requests, context)
    await anext(requests)


async def aborts(requests, context) -> None:
    await welcoming(requests, context)
    await anext(requests)
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "step.acquires[0].tokens: odd")


async def answers_another_step(requests, context) -> None:
    await welcoming(requests, context)
    await anext(requests)
    await context.write(step_reply(99))
    await anext(requests, None)


async def answers_nonsense(requests, context) -> None:
    await welcoming(requests, context)
    await anext(requests)
    await context.write(step_reply(1, extends=cache_pb2.ExtendGrants(sequence_ids=b"1234567")))
    await anext(requests, None)


async def sends_a_crooked_order(requests, context) -> None:
    await welcoming(requests, context)
    await context.write(order(1, num_pages=3))
    await anext(requests, None)
    await anext(requests, None)


async def orders_a_page_beyond_the_pool(requests, context) -> None:
    await welcoming(requests, context)
    await context.write(order(1, last_page=14))
    await anext(requests, None)
    await anext(requests, None)


async def sends_a_damaged_message(requests, context) -> None:
    await welcoming(requests, context)
    damaged = order(1)
    damaged.body = damaged.body[:-1] + bytes([damaged.body[-1] ^ 4])
    await context.write(damaged)
    await anext(requests, None)
    await anext(requests, None)


async def sends_no_message(requests, context) -> None:
    await welcoming(requests, context)
    body = b"\xff\xff"
    await context.write(cache_pb2.SessionResponse(body=body, crc32=zlib.crc32(body)))
    await anext(requests, None)
    await anext(requests, None)


async def says_nothing_known(requests, context) -> None:
    await welcoming(requests, context)
    await context.write(seal(cache_pb2.ManagerMessage()))
    await anext(requests, None)
    await anext(requests, None)


async def test_a_write_that_the_readers_cancellation_meets_is_a_lost_session() -> None:
    async with session(sends_a_crooked_order) as (client, _):
        await client.connect(0)
        stream = client._stream
        assert stream is not None

        async def write(request: object) -> None:
            """As gRPC ends a write that is under way when the call is cancelled."""
            await asyncio.wait({stream._reader})
            raise asyncio.CancelledError

        stream._call.write = write
        with pytest.raises(SessionLost, match=r"order\.spill"):
            await client.step(Step(1))


async def test_a_step_that_is_cancelled_is_no_lost_session() -> None:
    async with session(silent) as (client, _):
        await client.connect(0)
        asked = asyncio.create_task(client.step(Step(1)))
        await asyncio.sleep(0.05)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (ends, "ended"),
        (aborts, "INVALID_ARGUMENT"),
        (answers_another_step, "not asked"),
        (answers_nonsense, "extends"),
        (sends_a_crooked_order, "order.spill"),
        (orders_a_page_beyond_the_pool, "page 14 is beyond the 13 pages"),
        (sends_a_damaged_message, "crc32"),
        (sends_no_message, "session.body"),
        (says_nothing_known, "does not know"),
    ],
)
async def test_whatever_breaks_a_stream_is_a_lost_session_and_the_next_one_works(script: Script, reason: str) -> None:
    async def good(requests, context) -> None:
        await welcoming(requests, context)
        await context.write(step_reply((await hear(requests)).step.step_id))
        await anext(requests)

    async with session(script, good) as (client, servicer):
        await client.connect(0)
        with pytest.raises(SessionLost, match=reason):
            await client.step(Step(1))
        with pytest.raises(SessionLost):
            await client.step(Step(1))
        await client.connect(0)
        assert (await client.step(Step(1))).step_id == 1
        assert servicer.num_streams == 2


async def test_a_stalled_manager_is_a_lost_session() -> None:
    limits = ClientLimits(reply_timeout_s=0.2, backoff_min_s=0.001, backoff_max_s=0.01)
    async with session(silent, limits=limits) as (client, _):
        await client.connect(0)
        with pytest.raises(SessionLost, match="no reply to step"):
            await client.step(Step(1))


async def test_connect_tries_until_somebody_welcomes() -> None:
    async def busy(requests, context) -> None:
        await anext(requests)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down")

    async with session(busy, busy, silent) as (client, servicer):
        assert (await client.connect(0)).epoch == "e"
        assert servicer.num_streams == 3


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED])
async def test_a_refused_hello_is_final(code: grpc.StatusCode) -> None:
    async def refuses(requests, context) -> None:
        await anext(requests)
        await context.abort(code, "hello.page_tokens: no")

    async with session(refuses) as (client, servicer):
        with pytest.raises(SessionRefused, match="page_tokens"):
            await client.connect(0)
        assert servicer.num_streams == 2


async def test_orders_of_a_stream_end_with_it() -> None:
    async def orders_once(requests, context) -> None:
        await welcoming(requests, context)
        for ticket in (1, 2, 3):
            await context.write(order(ticket))
        await context.write(step_reply((await hear(requests)).step.step_id))
        await anext(requests, None)

    async with session(orders_once, silent) as (client, _):
        await client.connect(0)
        await client.step(Step(1))
        assert (await client.next_order()).ticket == 1
        waiting = asyncio.create_task(client.next_order())
        await client.disconnect()
        await client.connect(9)
        await asyncio.sleep(0.02)
        assert not waiting.done()
        waiting.cancel()


async def test_the_end_of_a_session_is_told_once_to_whoever_waits_for_orders() -> None:
    async def short(requests, context) -> None:
        await welcoming(requests, context)

    async with session(short, silent) as (client, _):
        await client.connect(0)
        with pytest.raises(SessionLost):
            await asyncio.wait_for(client.next_order(), 20)
        waiting = asyncio.create_task(client.next_order())
        await client.connect(0)
        await asyncio.sleep(0.02)
        assert not waiting.done()
        waiting.cancel()


async def test_close_says_goodbye() -> None:
    heard = asyncio.Event()

    async def script(requests, context) -> None:
        await welcoming(requests, context)
        assert (await hear(requests)).WhichOneof("message") == "goodbye"
        heard.set()

    async with session(script) as (client, _):
        await client.connect(0)
        await client.close()
        assert heard.is_set()


async def test_more_orders_than_may_wait_end_the_session() -> None:
    async def flood(requests, context) -> None:
        await welcoming(requests, context)
        for ticket in range(1, 6):
            await context.write(order(ticket))
        await anext(requests, None)

    limits = ClientLimits(reply_timeout_s=20, max_orders=4)
    async with session(flood, limits=limits) as (client, _):
        await client.connect(0)
        with pytest.raises(SessionLost, match="more than 4 orders"):
            await client.step(Step(1))
        assert (await client.next_order()).ticket == 1
