"""A link that damages what passes: nothing wrong comes through, and a connection that stays bad is left."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from protos.v1 import cache_pb2, cache_pb2_grpc
from rpc.client import open_channel
from session.limits import MAX_MESSAGE_BYTES
from session.messages import Step
from tests.e2e.proxy import open_proxy
from tests.worker_service.scripted_manager import (
    HELLO,
    LIMITS,
    Script,
    Scripted,
    hear,
    seal,
    session,
    silent,
    welcoming,
)
from worker_service.cache_client import CacheClient, ClientLimits
from worker_service.core.errors import SessionLost, StepRejected


async def test_a_damaged_connection_is_left_for_a_new_one() -> None:
    """A flipped bit of a header stays in the connection's header table: every later call on it fails, too."""
    server = grpc.aio.server()
    cache_pb2_grpc.add_PrefixCacheServicer_to_server(Scripted(silent), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    num_damaged = 0

    def damage(number: int, data: bytes) -> bytes:
        nonlocal num_damaged
        if number > 1 or b"PrefixCache/" not in data:
            return data
        num_damaged += 1
        return data.replace(b"PrefixCache/", b"PrefixCachd/")

    async with open_proxy(f"127.0.0.1:{port}") as proxy:
        proxy.damage = damage
        limits = ClientLimits(reply_timeout_s=1, backoff_min_s=0.01, backoff_max_s=0.05)
        client = CacheClient(lambda: open_channel(proxy.address, MAX_MESSAGE_BYTES), lambda: HELLO, limits)
        try:
            async with asyncio.timeout(20):
                welcome = await client.connect(0)
        finally:
            await client.close()
            await server.stop(0)
        assert welcome.epoch == "e"
        assert num_damaged == 1
        assert proxy.num_connections >= 2


async def test_a_hello_that_was_damaged_once_is_said_again() -> None:
    """A flipped bit of the Hello, or of the status that answers it, is no refusal."""

    def refuses(code: grpc.StatusCode, details: str) -> Script:
        async def script(requests, context) -> None:
            await anext(requests)
            await context.abort(code, details)

        return script

    damaged = refuses(grpc.StatusCode.INVALID_ARGUMENT, "session.crc32: 1 is not 2")
    odd = refuses(grpc.StatusCode.UNIMPLEMENTED, "no such method")
    async with session(damaged, damaged, damaged, odd, silent) as (client, servicer):
        assert (await client.connect(0)).epoch == "e"
        assert servicer.num_streams == 5


@pytest.mark.parametrize(
    ("welcome", "field"),
    [
        (cache_pb2.Welcome(epoch="e", limits=LIMITS), "generation"),
        (cache_pb2.Welcome(epoch="e", generation=1), "max_sequence_tokens"),
    ],
)
async def test_a_welcome_without_limits_or_generation_is_none(
    welcome: cache_pb2.Welcome, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(requests, context) -> None:
        await hear(requests)
        await context.write(seal(cache_pb2.ManagerMessage(welcome=welcome)))
        await anext(requests, None)

    caplog.set_level("INFO")
    async with session(script, silent) as (client, servicer):
        await client.connect(0)
        assert servicer.num_streams == 2
    assert field in caplog.text


@pytest.mark.parametrize(
    ("code", "is_rejected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        (grpc.StatusCode.INTERNAL, True),
        (grpc.StatusCode.UNAVAILABLE, False),
        (grpc.StatusCode.DATA_LOSS, False),
    ],
)
async def test_a_rejected_step_is_told_from_a_broken_link(code: grpc.StatusCode, is_rejected: bool) -> None:
    async def script(requests, context) -> None:
        await welcoming(requests, context)
        await anext(requests)
        await context.abort(code, "step.step_id: odd")

    async with session(script) as (client, _):
        await client.connect(0)
        with pytest.raises(SessionLost) as lost:
            await client.step(Step(1))
        assert isinstance(lost.value, StepRejected) == is_rejected


async def test_a_damaged_step_is_not_rejected() -> None:
    async def script(requests, context) -> None:
        await welcoming(requests, context)
        await anext(requests)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "session.crc32: 1 is not 2")

    async with session(script) as (client, _):
        await client.connect(0)
        with pytest.raises(SessionLost) as lost:
            await client.step(Step(1))
        assert not isinstance(lost.value, StepRejected)
