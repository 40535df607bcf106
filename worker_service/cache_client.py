"""The session with the cache service: CachePort over one gRPC stream at a time.

Every failure of a stream is a SessionLost, and the next Hello goes out on another one. Only a Hello that is refused
twice for the same reason is final, a SessionRefused: one refusal may be a message that was damaged on its way.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import NamedTuple

import grpc.aio

from rpc.logs import Outage
from session.errors import FieldError
from session.messages import Forget, Hello, Step, StepReply, Welcome
from session.wire.hello import decode_welcome, encode_hello
from session.wire.reply import decode_reply
from session.wire.step import encode_step
from session.words import Transfer
from worker_service.core.errors import SessionLost, SessionRefused, StepRejected
from worker_service.session_checks import PoolCheck
from worker_service.session_stream import OrderQueue, SessionStream

_log = logging.getLogger(__name__)


class ClientLimits(NamedTuple):
    reply_timeout_s: float = 10.0
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0
    max_orders: int = 1024


class CacheClient:
    """CachePort over gRPC; each attempt has a fresh channel of `make_channel`, so that no old backoff is inherited.

    `hello` returns what this worker is at present, except the generation: its endpoint and its tier may change.
    """

    def __init__(
        self,
        make_channel: Callable[[], grpc.aio.Channel],
        hello: Callable[[], Hello],
        limits: ClientLimits | None = None,
    ) -> None:
        self._make_channel = make_channel
        self._hello = hello
        self._limits = limits or ClientLimits()
        self._orders = OrderQueue(self._limits.max_orders)
        self._stream: SessionStream | None = None
        self._outage = Outage(_log, "no session with the cache service")

    async def connect(self, generation: int) -> Welcome:
        """Tries until a cache service welcomes this worker. Raises SessionRefused after two equal refusals."""
        pause_s = self._limits.backoff_min_s
        refusal = ""
        while True:
            await self.disconnect()
            try:
                return await self._hello_and_welcome(generation)
            except SessionLost as lost:
                self._outage.failed(lost)
            except SessionRefused as refused:
                if str(refused) == refusal:
                    raise
                refusal = str(refused)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads retries, guards nothing
            pause_s = min(2 * pause_s, self._limits.backoff_max_s)

    async def step(self, step: Step) -> StepReply:
        if self._stream is None:
            raise SessionLost("there is no session yet")
        message, check = await self._stream.ask(("step", step.step_id), encode_step(step)), self._stream.check
        try:
            reply = decode_reply(message.step_reply, len(check.groups))
        except FieldError as error:
            # Its checksum was right, so the service said this, and would say it again.
            raise StepRejected(str(error)) from error
        check.reply(reply)
        return reply

    async def next_order(self) -> Transfer | Forget:
        while True:
            if self._stream is not None:
                if self._orders.waiting:
                    return self._orders.waiting.popleft()
                self._stream.tell_loss_once()
            self._orders.news.clear()
            await self._orders.news.wait()

    async def disconnect(self) -> None:
        """Orders of this stream that were not taken are dropped: a Hello voids their tickets."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()
        self._orders.waiting.clear()

    async def close(self) -> None:
        """Sends Goodbye if the stream is open, then ends it."""
        if self._stream is not None:
            await self._stream.say_goodbye()
        await self.disconnect()

    async def _hello_and_welcome(self, generation: int) -> Welcome:
        hello = self._hello()._replace(generation=generation)
        check = PoolCheck(hello.groups, hello.page_tokens)
        self._stream = SessionStream(self._make_channel(), self._orders, check, self._limits.reply_timeout_s)
        message = await self._stream.ask(("welcome", 0), encode_hello(hello))
        self._outage.ended()
        try:
            welcome = decode_welcome(message.welcome)
        except FieldError as error:
            raise SessionLost(str(error)) from error
        check.take_limit(welcome.limits.max_sequence_tokens)
        return welcome
