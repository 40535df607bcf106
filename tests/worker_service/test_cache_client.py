"""The client against a scripted cache service on loopback: greetings, steps, replies and orders."""

from __future__ import annotations

import asyncio
import struct

import grpc
import pytest

from protos.v1 import cache_pb2, types_pb2
from session.limits import SessionLimits
from session.messages import (
    Ack,
    Acquire,
    Adopt,
    Extend,
    ExtendGrant,
    Grant,
    Publish,
    Rates,
    Refusal,
    Release,
    Remap,
    Step,
    StepReply,
    Welcome,
)
from session.words import (
    GroupPages,
    Match,
    MissReason,
    Namespace,
    PageId,
    RefusalReason,
    ReleaseReason,
    SequenceId,
    StateSlot,
    TicketId,
    Transfer,
    TransferPages,
    TransferStatus,
)
from tests.worker_service.scripted_manager import hear, order, session, silent, step_reply, u32, welcoming
from worker_service.core.errors import SessionRefused


async def test_hello_says_who_the_worker_is_and_the_welcome_is_understood() -> None:
    seen: list[cache_pb2.Hello] = []

    async def script(requests, context) -> None:
        seen.append(await welcoming(requests, context))
        await anext(requests)

    async with session(script) as (client, _):
        welcome = await client.connect(8)
    limits = SessionLimits(
        max_sequence_tokens=400,
        max_live_sequences=2,
        max_step_items=3,
        max_message_bytes=2**40,
        max_name_chars=5,
        max_adopt_pages=6,
        max_kept_bytes=7,
        grace_ms=8,
    )
    assert welcome == Welcome("e", generation=9, last_step_id=4, limits=limits, capabilities=("one", "two"))
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


STEP = Step(
    step_id=7,
    acks=(Ack(TicketId(1), num_done=2, status=TransferStatus.MISSING, num_bytes=3, seconds=0.5),),
    publishes=(Publish(SequenceId(1), tokens=b"\1\0\0\0", computed_tokens=5),),
    releases=(Release(SequenceId(2), ReleaseReason.FINISHED, rolling_tokens=12),),
    adopts=(
        Adopt(
            SequenceId(7),
            Namespace("m", adapter="a", salt="t"),
            tokens=b"\3\0\0\0",
            computed_tokens=1,
            tables=(GroupPages(group=1, first_page=2, page_ids=u32(4)),),
            working=(StateSlot(group=2, boundary_tokens=4, slot=PageId(5)),),
            rolling=(StateSlot(group=2, boundary_tokens=8, slot=PageId(6)),),
            priority=2,
            bypass_cache=True,
        ),
    ),
    extends=(Extend(SequenceId(4), num_tokens=40), Extend(SequenceId(5), num_tokens=50)),
    acquires=(
        Acquire(
            SequenceId(6),
            Namespace("m", adapter="a", salt="s"),
            tokens=b"\2\0\0\0",
            reserve_pages=3,
            chunk_tokens=4,
            priority=-5,
            kept_tokens=6,
            bypass_cache=True,
        ),
    ),
    rates=Rates(prefill_tokens_per_s=1.5, fetch_bytes_per_s=2.5, spill_bytes_per_s=3.5),
)
STEP_MESSAGE = cache_pb2.Step(
    step_id=7,
    acks=[cache_pb2.Ack(ticket=1, num_done=2, status="TRANSFER_STATUS_MISSING", num_bytes=3, seconds=0.5)],
    publishes=[cache_pb2.Publish(sequence_id=1, tokens=b"\1\0\0\0", computed_tokens=5)],
    releases=[cache_pb2.Release(sequence_id=2, reason="RELEASE_REASON_FINISHED", rolling_tokens=12)],
    adopts=[
        cache_pb2.Adopt(
            sequence_id=7,
            namespace=types_pb2.Namespace(model="m", adapter="a", salt="t"),
            tokens=b"\3\0\0\0",
            computed_tokens=1,
            tables=[types_pb2.GroupPages(group=1, first_page=2, page_ids=u32(4))],
            working=[types_pb2.SnapshotSlot(group=2, boundary_tokens=4, slot=5)],
            rolling=[types_pb2.SnapshotSlot(group=2, boundary_tokens=8, slot=6)],
            priority=2,
            bypass_cache=True,
        )
    ],
    extends=cache_pb2.Extends(sequence_ids=struct.pack("<2Q", 4, 5), num_tokens=u32(40, 50)),
    acquires=[
        cache_pb2.Acquire(
            sequence_id=6,
            namespace=types_pb2.Namespace(model="m", adapter="a", salt="s"),
            tokens=b"\2\0\0\0",
            reserve_pages=3,
            chunk_tokens=4,
            priority=-5,
            kept_tokens=6,
            bypass_cache=True,
        )
    ],
    rates=cache_pb2.Rates(prefill_tokens_per_s=1.5, fetch_bytes_per_s=2.5, spill_bytes_per_s=3.5),
)
MOVED = types_pb2.TransferPages(group=1, page_ids=u32(5), key_prefix="k:", page_hashes=bytes(32))
REPLY_FIELDS = {
    "grants": [
        types_pb2.Grant(
            sequence_id=1,
            usable_tokens=8,
            cached_tokens=5,
            fetched_tokens=3,
            tables=[types_pb2.GroupPages(group=1, first_page=2, page_ids=u32(7))],
            fetches=[types_pb2.Transfer(ticket=8, groups=[MOVED], first_page=2, num_pages=1)],
            restore=[types_pb2.SnapshotSlot(group=2, boundary_tokens=8, slot=1)],
            leave=[types_pb2.SnapshotSlot(group=2, boundary_tokens=12, slot=2)],
            working=[types_pb2.SnapshotSlot(group=2, boundary_tokens=0, slot=3)],
            rolling=[types_pb2.SnapshotSlot(group=2, boundary_tokens=4, slot=4)],
            match=types_pb2.MatchResult(
                matched_tokens=9,
                usable_tokens=8,
                host_tokens=4,
                limiting_group="window",
                miss_reason="MISS_REASON_WINDOW_GONE",
            ),
        )
    ],
    "extends": cache_pb2.ExtendGrants(
        sequence_ids=struct.pack("<2Q", 4, 5),
        first_pages=u32(1, 1, 0, 9, 0, 0),
        num_pages=u32(2, 0, 0, 1, 0, 0),
        page_ids=u32(11, 12, 13),
        snapshots=[cache_pb2.SequenceSnapshots(sequence_id=5, leave=[types_pb2.SnapshotSlot(group=2, slot=6)])],
    ),
    "refusals": [
        types_pb2.Refusal(sequence_id=6, reason="REFUSAL_REASON_INVALID", detail="odd", field="step.acquires[0].tokens")
    ],
    "remaps": [cache_pb2.Remap(sequence_id=4, pages=[types_pb2.GroupPages(first_page=1, page_ids=u32(2))])],
}
REPLY = StepReply(
    step_id=7,
    grants=(
        Grant(
            SequenceId(1),
            usable_tokens=8,
            cached_tokens=5,
            fetched_tokens=3,
            tables=(GroupPages(group=1, first_page=2, page_ids=u32(7)),),
            match=Match(
                matched_tokens=9,
                usable_tokens=8,
                host_tokens=4,
                limiting_group="window",
                miss_reason=MissReason.WINDOW_GONE,
            ),
            fetches=(
                Transfer(
                    TicketId(8),
                    (TransferPages(group=1, page_ids=u32(5), key_prefix="k:", page_hashes=bytes(32)),),
                    first_page=2,
                    num_pages=1,
                ),
            ),
            restore=(StateSlot(group=2, boundary_tokens=8, slot=PageId(1)),),
            snapshots=(StateSlot(group=2, boundary_tokens=12, slot=PageId(2)),),
            working=(StateSlot(group=2, boundary_tokens=0, slot=PageId(3)),),
            rolling=(StateSlot(group=2, boundary_tokens=4, slot=PageId(4)),),
        ),
    ),
    extends=(
        ExtendGrant(SequenceId(4), pages=(GroupPages(group=0, first_page=1, page_ids=u32(11, 12)),)),
        ExtendGrant(
            SequenceId(5),
            pages=(GroupPages(group=0, first_page=9, page_ids=u32(13)),),
            snapshots=(StateSlot(group=2, boundary_tokens=0, slot=PageId(6)),),
        ),
    ),
    refusals=(Refusal(SequenceId(6), RefusalReason.INVALID, detail="odd", field="step.acquires[0].tokens"),),
    remaps=(Remap(SequenceId(4), pages=(GroupPages(group=0, first_page=1, page_ids=u32(2)),)),),
)


async def test_every_word_of_a_step_and_its_reply_comes_across() -> None:
    seen: list[cache_pb2.Step] = []

    async def script(requests, context) -> None:
        await welcoming(requests, context)
        seen.append((await hear(requests)).step)
        await context.write(step_reply(7, **REPLY_FIELDS))
        await anext(requests)

    async with session(script) as (client, _):
        await client.connect(0)
        reply = await client.step(STEP)
    assert seen == [STEP_MESSAGE]
    assert reply == REPLY


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
