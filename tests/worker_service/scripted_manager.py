"""A cache service for the worker's client that plays scripts on loopback."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from protos.v1 import cache_pb2, cache_pb2_grpc, types_pb2
from rpc.client import open_channel
from session.limits import MAX_MESSAGE_BYTES
from session.messages import Hello
from session.words import GroupKind, GroupSpec, HostTierKind, WorkerId
from worker_service.cache_client import CacheClient, ClientLimits

GROUPS = (
    GroupSpec("full", GroupKind.FULL, 13, 64),
    GroupSpec("window", GroupKind.WINDOW, 9, 32, 8),
    GroupSpec("state", GroupKind.STATE, 6, 32),
)
HELLO = Hello(
    WorkerId("w"),
    "127.0.0.1:1",
    "incarnation-1",
    b"f" * 32,
    4,
    GROUPS,
    HostTierKind.SHARED,
    "tier-1",
    model="model-1",
)
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
    client = CacheClient(lambda: open_channel(f"127.0.0.1:{port}", MAX_MESSAGE_BYTES), lambda: HELLO, limits)
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


def order(ticket: int, num_pages: int = 2, last_page: int = 6) -> cache_pb2.SessionResponse:
    pages = types_pb2.TransferPages(group=0, page_ids=u32(5, last_page), key_prefix="k:", page_hashes=bytes(64))
    transfer = types_pb2.Transfer(ticket=ticket, groups=[pages], num_pages=num_pages)
    return seal(cache_pb2.ManagerMessage(order=cache_pb2.Order(spill=transfer)))
