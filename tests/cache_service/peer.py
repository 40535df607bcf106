"""A worker as the cache service sees one: a Session stream that a test drives message by message.

`started` runs a service on loopback with settings fit for tests.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from cache_service.bootstrap import CacheService, running
from cache_service.config import CacheConfig
from protos.v1 import cache_pb2, cache_pb2_grpc
from rpc.client import open_channel
from session.limits import MAX_MESSAGE_BYTES
from tests.session.messages import hello, sealed

PATIENCE_S = 20.0


class Peer:
    """One Session stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub: Any = cache_pb2_grpc.PrefixCacheStub(channel)
        self.stream = stub.Session()
        self.orders: list[Any] = []
        self._step_id = 0
        self.generation = 0

    async def send(self, **message: Any) -> None:
        await self.stream.write(sealed(**message))

    async def receive(self) -> Any:
        """The next message of the service, or EOF."""
        async with asyncio.timeout(PATIENCE_S):
            envelope = await self.stream.read()
        if envelope is grpc.aio.EOF:
            return envelope
        assert zlib.crc32(envelope.body) == envelope.crc32
        return cache_pb2.ManagerMessage.FromString(envelope.body)

    async def hello(self, generation: int = 0, **fields: Any) -> Any:
        message = hello(**fields)
        message.generation = generation
        await self.send(hello=message)
        welcome = (await self.receive()).welcome
        self.generation = welcome.generation
        return welcome

    async def answer(self) -> Any:
        """The next message that is no order; orders are kept aside."""
        while True:
            message = await self.receive()
            if message is grpc.aio.EOF or message.WhichOneof("message") != "order":
                return message
            self.orders.append(message.order.spill)

    async def step(self, **fields: Any) -> Any:
        """Sends a Step and returns its reply."""
        if "step_id" not in fields:
            self._step_id += 1
            fields["step_id"] = self._step_id
        await self.send(step=cache_pb2.Step(**fields))
        message = await self.answer()
        assert message is not grpc.aio.EOF, await self.ended()
        return message.step_reply

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """The status that the service ended the stream with."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.stream.code(), await self.stream.details()

    async def hang_up(self) -> None:
        """Half-closes, and waits until the service has ended its side."""
        await self.stream.done_writing()
        # The status comes after the last message, so what is on its way has to be read.
        while await self.answer() is not grpc.aio.EOF:
            pass


class Client:
    """Channels to a running service and its admin address, and what tests need from behind them."""

    def __init__(self, service: CacheService, channel: grpc.aio.Channel, admin_channel: grpc.aio.Channel) -> None:
        self.service = service
        self.channel = channel
        self.admin_channel = admin_channel
        self.admin: Any = cache_pb2_grpc.CacheAdminStub(admin_channel)
        self.manager: Any = service.manager
        self.stub: Any = cache_pb2_grpc.PrefixCacheStub(channel)

    def peer(self) -> Peer:
        return Peer(self.channel)

    async def connected(self, **fields: Any) -> Peer:
        peer = self.peer()
        await peer.hello(**fields)
        return peer


class Clock:
    """Time that goes on only when a test says so."""

    def __init__(self) -> None:
        self.now_ms = 1_000

    def __call__(self) -> int:
        return self.now_ms


@asynccontextmanager
async def started(
    make_manager: Callable[..., Any] | None = None, clock: Callable[[], int] | None = None, **settings: Any
) -> AsyncIterator[Client]:
    config = CacheConfig(**{"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "drain_timeout_s": 5.0, **settings})
    extra: dict[str, Any] = {"make_manager": make_manager} if make_manager else {}
    async with (
        running(config, clock or Clock(), **extra) as service,
        open_channel(str(service.address), MAX_MESSAGE_BYTES) as channel,
        open_channel(str(service.admin_address), MAX_MESSAGE_BYTES) as admin_channel,
    ):
        yield Client(service, channel, admin_channel)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)
