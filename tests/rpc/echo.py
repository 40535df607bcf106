"""A service of all four call shapes, made for tests: it answers a health request's name in a health request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest as Text

from rpc.client import open_channel
from rpc.options import ServerLimits
from rpc.request_id import current_request_id
from rpc.server import RpcServer, Service
from session.limits import MAX_MESSAGE_BYTES

NAME = "test.Echo"
SHAPES = ("Unary", "Out", "In", "Both")


class KnownError(Exception):
    pass


class NarrowerError(KnownError):
    pass


LIMITS = ServerLimits(MAX_MESSAGE_BYTES)


class Echo:
    """Keeps what it was asked, so that a test can tell whether a request got through."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ended: list[str] = []
        self.address = ""

    async def answer(self, request: Text) -> Text:
        self.asked.append(request.service)
        match request.service.split(" ", 1):
            case ["known", reason]:
                raise KnownError(reason)
            case ["narrower", reason]:
                raise NarrowerError(reason)
            case ["unexpected", reason]:
                raise RuntimeError(reason)
            case ["id"]:
                return Text(service=current_request_id())
            case ["hang"]:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.ended.append("hang")
        return request

    async def unary(self, request: Text, context: Any) -> Text:
        return await self.answer(request)

    async def out(self, request: Text, context: Any) -> AsyncIterator[Text]:
        yield await self.answer(request)
        try:
            while request.service == "flood":
                yield Text(service="x" * 100_000)
        finally:
            if request.service == "flood":
                self.ended.append("flood")
        yield Text(service="end")

    async def inwards(self, requests: AsyncIterator[Text], context: Any) -> Text:
        return Text(service=",".join([(await self.answer(request)).service async for request in requests]))

    async def both(self, requests: AsyncIterator[Text], context: Any) -> None:
        async for request in requests:
            await context.write(await self.answer(request))


def add_echo(servicer: Any, server: Any) -> None:
    coding = (Text.FromString, Text.SerializeToString)
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(servicer.unary, *coding),
        "Out": grpc.unary_stream_rpc_method_handler(servicer.out, *coding),
        "In": grpc.stream_unary_rpc_method_handler(servicer.inwards, *coding),
        "Both": grpc.stream_stream_rpc_method_handler(servicer.both, *coding),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


@asynccontextmanager
async def serving(
    *middleware: Any, limits: ServerLimits = LIMITS
) -> AsyncIterator[tuple[Echo, grpc.aio.Channel, RpcServer]]:
    echo = Echo()
    server = RpcServer([Service(NAME, add_echo, echo)], middleware, limits)
    address = await server.start("127.0.0.1:0")
    echo.address = str(address)
    async with open_channel(str(address), MAX_MESSAGE_BYTES) as channel:
        try:
            yield echo, channel, server
        finally:
            await server.stop(0)


async def call(
    channel: grpc.aio.Channel,
    shape: str,
    *raws: bytes,
    limit_s: float | None = 20,
    metadata: Any = None,
    name: str = NAME,
) -> list[bytes]:
    """Sends raw bytes to a method of any shape; returns the raw answers."""
    method = f"/{name}/{shape}"
    options: Any = {"timeout": limit_s, "metadata": metadata}

    async def stream() -> AsyncIterator[bytes]:
        for raw in raws:
            yield raw

    if shape == "Unary":
        return [await channel.unary_unary(method)(raws[0], **options)]
    if shape == "In":
        return [await channel.stream_unary(method)(stream(), **options)]
    if shape == "Out":
        return [raw async for raw in channel.unary_stream(method)(raws[0], **options)]
    return [raw async for raw in channel.stream_stream(method)(stream(), **options)]


def text(value: str) -> bytes:
    raw: bytes = Text(service=value).SerializeToString()
    return raw


def texts(raws: list[bytes]) -> list[str]:
    return [Text.FromString(raw).service for raw in raws]


async def code_of(awaitable: Any) -> tuple[grpc.StatusCode, str]:
    """The status that a call ends with; fails when it succeeds."""
    try:
        answer = await awaitable
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"answered {answer!r}")
