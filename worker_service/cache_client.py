"""The session with the cache service: CachePort over one gRPC stream.

Knows no scheduler and no page. One reader task sorts what arrives: replies to whoever waits for them, orders to a
bounded queue. Whatever goes wrong with a stream is one SessionLost; only a refused Hello is final, a SessionRefused.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import grpc
import grpc.aio

from protos.v1 import cache_pb2, cache_pb2_grpc
from worker_service import session_codec
from worker_service.core.ports import (
    Adopt,
    Grant,
    GroupSpec,
    HostTierKind,
    Refusal,
    SequenceId,
    SessionLost,
    Step,
    StepReply,
    Transfer,
    Welcome,
)

PROTOCOL_VERSION = 1
_FINAL_CODES = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED, grpc.StatusCode.UNIMPLEMENTED}
_Answer = TypeVar("_Answer")
_StreamCall = grpc.aio.StreamStreamCall[cache_pb2.SessionRequest, cache_pb2.SessionResponse]
_log = logging.getLogger(__name__)


class SessionRefused(Exception):
    """The cache service will not take this worker: another one has its name, or the two do not fit together."""


class WorkerFacts(NamedTuple):
    """What a Hello says about this worker beside its live sequences and what may change: where it is, and its tier."""

    worker_id: str
    incarnation: str
    fingerprint: bytes
    page_tokens: int
    groups: tuple[GroupSpec, ...]


class Whereabouts(NamedTuple):
    """What is only known once this worker listens, or may change while it lives; asked anew for each Hello."""

    endpoint: str
    host_tier: HostTierKind
    host_tier_id: str


class ClientLimits(NamedTuple):
    reply_timeout_s: float = 10.0
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0
    max_orders: int = 1024


class CacheClient:
    """CachePort over gRPC; each attempt has a fresh channel of `make_channel`, so that no old backoff is inherited."""

    def __init__(
        self,
        make_channel: Callable[[], grpc.aio.Channel],
        facts: WorkerFacts,
        whereabouts: Callable[[], Whereabouts],
        limits: ClientLimits | None = None,
    ) -> None:
        self._make_channel = make_channel
        self._facts = facts
        self._whereabouts = whereabouts
        self._limits = limits or ClientLimits()
        self._inbox = _Inbox(self._limits.max_orders)
        self._stream: _Stream | None = None

    async def connect(self, live_sequences: Sequence[SequenceId]) -> Welcome:
        """Try until a cache service welcomes this worker."""
        pause_s = self._limits.backoff_min_s
        while True:
            await self._hang_up()
            try:
                return await self._say_hello(live_sequences)
            except SessionLost as lost:
                _log.info("no session with the cache service: %s", lost)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads retries, guards nothing
            pause_s = min(2 * pause_s, self._limits.backoff_max_s)

    async def step(self, step: Step) -> StepReply:
        request = session_codec.encode_step(step)
        message = await self._ask(("step", step.step_id), request)
        return session_codec.decode_reply(message.step_reply, len(self._facts.groups))

    async def adopt(self, adopt: Adopt) -> Grant | Refusal:
        message = await self._ask(("adopt", adopt.sequence_id), session_codec.encode_adopt(adopt))
        reply = message.adopt_reply
        if reply.WhichOneof("result") == "grant":
            return session_codec.decode_grant(reply.grant)
        return session_codec.decode_refusal(reply.refusal)

    async def next_order(self) -> Transfer:
        while True:
            if self._inbox.orders:
                return self._inbox.orders.popleft()
            if self._stream is not None:
                self._stream.tell_loss_once()
            self._inbox.news.clear()
            await self._inbox.news.wait()

    async def close(self) -> None:
        """Say Goodbye where somebody still listens, then end the stream."""
        if self._stream is not None:
            await self._stream.say_goodbye()
        await self._hang_up()

    async def _say_hello(self, live_sequences: Sequence[SequenceId]) -> Welcome:
        hello = self._hello(live_sequences)
        self._stream = _Stream(self._make_channel(), self._inbox, self._limits)
        message = await self._ask(("welcome", 0), cache_pb2.SessionRequest(hello=hello))
        return session_codec.decode_welcome(message.welcome)

    def _hello(self, live_sequences: Sequence[SequenceId]) -> cache_pb2.Hello:
        facts, whereabouts = self._facts, self._whereabouts()
        return cache_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=facts.worker_id,
            endpoint=whereabouts.endpoint,
            incarnation=facts.incarnation,
            fingerprint=facts.fingerprint,
            page_tokens=facts.page_tokens,
            groups=[session_codec.encode_group(spec) for spec in facts.groups],
            live_sequences=session_codec.pack_u64(live_sequences),
            host_tier=cache_pb2.HostTierKind.ValueType(int(whereabouts.host_tier)),
            host_tier_id=whereabouts.host_tier_id,
            num_ranks=1,
        )

    async def _ask(self, key: _Key, request: cache_pb2.SessionRequest) -> cache_pb2.SessionResponse:
        if self._stream is None:
            raise SessionLost("there is no session yet")
        return await self._stream.ask(key, request)

    async def _hang_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()


_Key = tuple[str, int]


class _Inbox:
    """What streams bring unasked: orders, and the news that one of them has ended. Outlives every stream."""

    def __init__(self, max_orders: int) -> None:
        self.news = asyncio.Event()
        self.orders: deque[Transfer] = deque()
        self._max_orders = max_orders

    def put(self, order: Transfer) -> None:
        if len(self.orders) >= self._max_orders:
            raise SessionLost(f"more than {self._max_orders} orders wait")
        self.orders.append(order)
        self.news.set()


class _Stream:
    """One stream from its first write to its end. Knows nothing of the streams before and after it."""

    def __init__(self, channel: grpc.aio.Channel, inbox: _Inbox, limits: ClientLimits) -> None:
        self._channel = channel
        self._inbox = inbox
        self._limits = limits
        self._waiting: dict[_Key, asyncio.Future[cache_pb2.SessionResponse]] = {}
        self._lost: Exception | None = None
        self._is_loss_told = False
        self._welcomed = False
        # The generated stub is typed for both the blocking and the asyncio channel.
        stub = cache_pb2_grpc.PrefixCacheStub(channel)
        self._call: _StreamCall = stub.Session()
        self._reader = asyncio.create_task(self._read(), name="session-reader")

    async def ask(self, key: _Key, request: cache_pb2.SessionRequest) -> cache_pb2.SessionResponse:
        if self._lost is not None:
            raise self._lost
        answer = asyncio.get_running_loop().create_future()
        self._waiting[key] = answer
        try:
            async with asyncio.timeout(self._limits.reply_timeout_s):
                await self._call.write(request)
                return await asyncio.shield(answer)
        except TimeoutError as error:
            lost = SessionLost(f"no reply to {key[0]} within {self._limits.reply_timeout_s} s")
            self._end(lost)
            raise lost from error
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            # The reader learns the status; what it found says more than a failed write does.
            await asyncio.wait({self._reader}, timeout=self._limits.reply_timeout_s)
            raise self._lost or SessionLost(str(error)) from error
        finally:
            self._waiting.pop(key, None)
            _forget(answer)

    def tell_loss_once(self) -> None:
        """Raises what ended this stream after its Welcome, if it has ended and this was not told yet."""
        if self._lost is not None and self._welcomed and not self._is_loss_told:
            self._is_loss_told = True
            raise self._lost

    async def say_goodbye(self) -> None:
        if self._lost is not None:
            return
        try:
            async with asyncio.timeout(self._limits.reply_timeout_s):
                await self._call.write(cache_pb2.SessionRequest(goodbye=cache_pb2.Goodbye()))
                await self._call.done_writing()
                await asyncio.wait({self._reader})
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            _log.info("the cache service did not take the Goodbye")

    async def close(self) -> None:
        self._end(SessionLost("closed"))
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self._sort(message)
            self._end(SessionLost("the cache service ended the stream"))
        except grpc.aio.AioRpcError as error:
            self._end(self._loss(error))
        except SessionLost as lost:
            self._end(lost)
            self._call.cancel()

    def _loss(self, error: grpc.aio.AioRpcError) -> Exception:
        text = f"{error.code().name}: {error.details()}"
        if not self._welcomed and error.code() in _FINAL_CODES:
            return SessionRefused(text)
        return SessionLost(text)

    def _sort(self, message: cache_pb2.SessionResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "order":
            self._take_order(message.order)
        elif kind == "step_reply":
            self._answer(("step", message.step_reply.step_id), message)
        elif kind == "adopt_reply":
            result = message.adopt_reply
            grant = result.WhichOneof("result") == "grant"
            self._answer(("adopt", result.grant.sequence_id if grant else result.refusal.sequence_id), message)
        elif kind == "welcome":
            self._welcomed = True
            self._answer(("welcome", 0), message)
        else:
            raise SessionLost("the cache service said something that this worker does not know")

    def _answer(self, key: _Key, message: cache_pb2.SessionResponse) -> None:
        answer = self._waiting.get(key)
        if answer is None or answer.done():
            raise SessionLost(f"{key[0]} {key[1]} was answered but not asked")
        answer.set_result(message)

    def _take_order(self, order: cache_pb2.Order) -> None:
        self._inbox.put(session_codec.decode_transfer("order.spill", order.spill))

    def _end(self, lost: Exception) -> None:
        if self._lost is None:
            self._lost = lost
            self._inbox.news.set()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._lost)


def _forget(answer: asyncio.Future[_Answer]) -> None:
    """Mark a failure as seen, so that an answer nobody waits for any more is not reported as unhandled."""
    if answer.done() and not answer.cancelled():
        answer.exception()
