"""The client against a scripted cache service on loopback: answers, orders, and every way to lose a stream."""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from protos.v1 import cache_pb2, cache_pb2_grpc, types_pb2
from rpc.client import open_channel
from worker_service.cache_client import CacheClient, ClientLimits, SessionRefused, Whereabouts, WorkerFacts
from worker_service.core.ports import (
    Ack,
    Acquire,
    Adopt,
    Extend,
    ExtendGrant,
    GroupKind,
    GroupPages,
    GroupSpec,
    HostTierKind,
    Namespace,
    Publish,
    Rates,
    RefusalReason,
    Release,
    ReleaseReason,
    SequenceId,
    SessionLost,
    Step,
    TicketId,
    TransferStatus,
)

GROUPS = (GroupSpec("full", GroupKind.FULL, 10, 64), GroupSpec("window", GroupKind.WINDOW, 9, 32, 8))
FACTS = WorkerFacts("w", "incarnation-1", b"f" * 32, 4, GROUPS)
WHEREABOUTS = Whereabouts("127.0.0.1:1", HostTierKind.SHARED, "tier-1")
WELCOME = cache_pb2.SessionResponse(
    welcome=cache_pb2.Welcome(epoch="e", known_sequences=struct.pack("<2Q", 3, 2**63), last_step_id=4)
)
Script = Callable[[AsyncIterator[cache_pb2.SessionRequest], grpc.aio.ServicerContext], Awaitable[None]]


def u32(*numbers: int) -> bytes:
    return array("I", numbers).tobytes()


def step_reply(step_id: int, **fields: object) -> cache_pb2.SessionResponse:
    return cache_pb2.SessionResponse(step_reply=cache_pb2.StepReply(step_id=step_id, **fields))  # type: ignore[arg-type]


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
    hello = await anext(requests)
    await context.write(WELCOME)
    return hello.hello


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
        welcome = await client.connect([SequenceId(3), SequenceId(2**63), SequenceId(9)])
        assert welcome == ("e", frozenset({3, 2**63}), 4)
    hello = seen[0]
    assert (hello.protocol_version, hello.worker_id, hello.incarnation) == (1, "w", "incarnation-1")
    assert (hello.endpoint, hello.host_tier, hello.host_tier_id) == ("127.0.0.1:1", 3, "tier-1")
    assert (hello.fingerprint, hello.page_tokens, hello.num_ranks) == (b"f" * 32, 4, 1)
    assert hello.live_sequences == struct.pack("<3Q", 3, 2**63, 9)
    assert [(g.name, g.kind, g.num_pages, g.page_bytes, g.window_tokens) for g in hello.groups] == [
        ("full", 1, 10, 64, 0),
        ("window", 2, 9, 32, 8),
    ]


async def test_every_word_of_a_step_and_its_reply_comes_across() -> None:
    seen: list[cache_pb2.Step] = []
    fetch = types_pb2.Transfer(
        ticket=8, groups=[types_pb2.TransferPages(group=0, page_ids=u32(5), keys=[b"k"])], first_page=1, num_pages=1
    )
    grant = types_pb2.Grant(
        sequence_id=1,
        usable_tokens=8,
        cached_tokens=4,
        fetched_tokens=4,
        tables=[types_pb2.GroupPages(group=1, first_page=2, page_ids=u32(7))],
        fetch=fetch,
        restore=[types_pb2.SnapshotSlot(group=2, boundary_tokens=8, slot=3)],
        match=types_pb2.MatchResult(matched_tokens=9, usable_tokens=8, limiting_group="window", miss_reason=6),
    )
    extends = cache_pb2.ExtendGrants(
        sequence_ids=struct.pack("<2Q", 4, 5),
        first_pages=u32(1, 1, 9, 0),
        num_pages=u32(2, 0, 1, 0),
        page_ids=u32(11, 12, 13),
        snapshots=[cache_pb2.SequenceSnapshots(sequence_id=5, leave=[types_pb2.SnapshotSlot(slot=6)])],
    )

    async def script(requests, context) -> None:
        await welcoming(requests, context)
        seen.append((await anext(requests)).step)
        await context.write(
            step_reply(
                7,
                grants=[grant],
                extends=extends,
                refusals=[types_pb2.Refusal(sequence_id=6, reason=2, detail="full up")],
                remaps=[cache_pb2.Remap(sequence_id=4, pages=[types_pb2.GroupPages(first_page=1, page_ids=u32(2))])],
            )
        )
        await anext(requests)

    step = Step(
        7,
        (Ack(TicketId(1), 2, TransferStatus.MISSING, 3, 0.5),),
        (Publish(SequenceId(1), b"\1\0\0\0", 5),),
        (Release(SequenceId(2), ReleaseReason.PREEMPTED),),
        (Extend(SequenceId(4), 40), Extend(SequenceId(5), 50)),
        (Acquire(SequenceId(6), Namespace("m", "a", "s"), b"\2\0\0\0", 3, 4, -5),),
        Rates(1.5, 2.5),
    )
    async with session(script) as (client, _):
        await client.connect([])
        reply = await client.step(step)
    sent = seen[0]
    assert (sent.acks[0].ticket, sent.acks[0].num_done, sent.acks[0].status) == (1, 2, 2)
    assert (sent.acks[0].num_bytes, sent.acks[0].seconds) == (3, 0.5)
    assert (sent.publishes[0].tokens, sent.publishes[0].computed_tokens) == (b"\1\0\0\0", 5)
    assert (sent.releases[0].sequence_id, sent.releases[0].reason) == (2, 3)
    assert sent.extends.sequence_ids == struct.pack("<2Q", 4, 5)
    assert sent.extends.num_tokens == u32(40, 50)
    acquire = sent.acquires[0]
    assert (acquire.namespace.model, acquire.namespace.adapter, acquire.namespace.salt) == ("m", "a", "s")
    assert (acquire.tokens, acquire.reserve_pages, acquire.chunk_tokens, acquire.priority) == (b"\2\0\0\0", 3, 4, -5)
    assert (sent.rates.prefill_tokens_per_s, sent.rates.fetch_bytes_per_s) == (1.5, 2.5)
    assert reply.grants[0].tables == (GroupPages(1, 2, u32(7)),)
    assert reply.grants[0].fetch == (8, ((0, u32(5), (b"k",)),), 1, 1)
    assert reply.grants[0].restore == ((2, 8, 3),)
    assert reply.grants[0].match == (9, 8, 0, "window", 6)
    assert reply.extends == (
        ExtendGrant(SequenceId(4), (GroupPages(0, 1, u32(11, 12)),)),
        ExtendGrant(SequenceId(5), (GroupPages(0, 9, u32(13)),), ((0, 0, 6),)),  # type: ignore[arg-type]
    )
    assert reply.refusals == ((6, RefusalReason.NO_ROOM, "full up"),)
    assert reply.remaps == ((4, (GroupPages(0, 1, u32(2)),)),)


async def test_orders_arrive_between_replies_in_their_order() -> None:
    async def script(requests, context) -> None:
        await welcoming(requests, context)
        for ticket in (1, 2):
            await context.write(order(ticket))
        await context.write(step_reply((await anext(requests)).step.step_id))
        await context.write(order(3))
        await anext(requests)

    async with session(script) as (client, _):
        await client.connect([])
        assert (await client.step(Step(1))).step_id == 1
        assert [(await client.next_order()).ticket for _ in range(3)] == [1, 2, 3]


def order(ticket: int) -> cache_pb2.SessionResponse:
    pages = types_pb2.TransferPages(group=0, page_ids=u32(5, 6), keys=[b"a", b"b"])
    transfer = types_pb2.Transfer(ticket=ticket, groups=[pages], num_pages=2)
    return cache_pb2.SessionResponse(order=cache_pb2.Order(spill=transfer))


async def test_adopt_answers_a_grant_or_a_refusal() -> None:
    async def script(requests, context) -> None:
        await welcoming(requests, context)
        adopt = (await anext(requests)).adopt
        assert adopt.tables[0].page_ids == u32(4)
        reply = cache_pb2.AdoptReply(grant=types_pb2.Grant(sequence_id=adopt.sequence_id, usable_tokens=4))
        await context.write(cache_pb2.SessionResponse(adopt_reply=reply))
        adopt = (await anext(requests)).adopt
        reply = cache_pb2.AdoptReply(refusal=types_pb2.Refusal(sequence_id=adopt.sequence_id, reason=1))
        await context.write(cache_pb2.SessionResponse(adopt_reply=reply))
        await anext(requests)

    async with session(script) as (client, _):
        await client.connect([])
        tables = (GroupPages(0, 0, u32(4)),)
        grant = await client.adopt(Adopt(SequenceId(1), Namespace("m"), b"\0\0\0\0", 1, tables))
        refusal = await client.adopt(Adopt(SequenceId(2), Namespace("m"), b"\0\0\0\0", 1, tables))
        assert (grant.sequence_id, grant.usable_tokens) == (1, 4)  # type: ignore[union-attr]
        assert (refusal.sequence_id, refusal.reason) == (2, RefusalReason.NEVER_FITS)  # type: ignore[union-attr]


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
    broken = order(1)
    broken.order.spill.num_pages = 3
    await context.write(broken)
    await anext(requests, None)
    await anext(requests, None)


async def says_nothing_known(requests, context) -> None:
    await welcoming(requests, context)
    await context.write(cache_pb2.SessionResponse())
    await anext(requests, None)
    await anext(requests, None)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (ends, "ended"),
        (aborts, "INVALID_ARGUMENT"),
        (answers_another_step, "not asked"),
        (answers_nonsense, "extends"),
        (sends_a_crooked_order, "order.spill"),
        (says_nothing_known, "does not know"),
    ],
)
async def test_whatever_breaks_a_stream_is_a_lost_session_and_the_next_one_works(script: Script, reason: str) -> None:
    async def good(requests, context) -> None:
        await welcoming(requests, context)
        await context.write(step_reply((await anext(requests)).step.step_id))
        await anext(requests)

    async with session(script, good) as (client, servicer):
        await client.connect([])
        with pytest.raises(SessionLost, match=reason):
            await client.step(Step(1))
        with pytest.raises(SessionLost):
            await client.step(Step(1))
        await client.connect([])
        assert (await client.step(Step(1))).step_id == 1
        assert servicer.num_streams == 2


async def test_a_stalled_manager_is_a_lost_session() -> None:
    limits = ClientLimits(reply_timeout_s=0.2, backoff_min_s=0.001, backoff_max_s=0.01)
    async with session(silent, limits=limits) as (client, _):
        await client.connect([])
        with pytest.raises(SessionLost, match="no reply to step"):
            await client.step(Step(1))


async def test_connect_tries_until_somebody_welcomes() -> None:
    async def busy(requests, context) -> None:
        await anext(requests)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down")

    async with session(busy, busy, silent) as (client, servicer):
        assert (await client.connect([])).epoch == "e"
        assert servicer.num_streams == 3


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED])
async def test_a_refused_hello_is_final(code: grpc.StatusCode) -> None:
    async def refuses(requests, context) -> None:
        await anext(requests)
        await context.abort(code, "hello.page_tokens: no")

    async with session(refuses) as (client, servicer):
        with pytest.raises(SessionRefused, match="page_tokens"):
            await client.connect([])
        assert servicer.num_streams == 1


async def test_the_end_of_a_session_is_told_once_to_whoever_waits_for_orders() -> None:
    async def short(requests, context) -> None:
        await welcoming(requests, context)

    async with session(short, silent) as (client, _):
        await client.connect([])
        with pytest.raises(SessionLost):
            await asyncio.wait_for(client.next_order(), 20)
        waiting = asyncio.create_task(client.next_order())
        await client.connect([])
        await asyncio.sleep(0.02)
        assert not waiting.done()
        waiting.cancel()


async def test_close_says_goodbye() -> None:
    heard = asyncio.Event()

    async def script(requests, context) -> None:
        await welcoming(requests, context)
        assert (await anext(requests)).WhichOneof("message") == "goodbye"
        heard.set()

    async with session(script) as (client, _):
        await client.connect([])
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
        await client.connect([])
        with pytest.raises(SessionLost, match="more than 4 orders"):
            await client.step(Step(1))
        assert (await client.next_order()).ticket == 1
