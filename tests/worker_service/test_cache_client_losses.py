"""Every way to lose a stream to the cache service: the client says so once, and the next stream works."""

from __future__ import annotations

import asyncio
import zlib

import grpc
import pytest

from protos.v1 import cache_pb2
from session.messages import Step
from tests.worker_service.scripted_manager import Script, hear, order, seal, session, silent, step_reply, welcoming
from worker_service.cache_client import ClientLimits
from worker_service.core.errors import SessionLost


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
