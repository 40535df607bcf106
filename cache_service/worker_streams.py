"""The Session streams: one for each connected worker, the newest of each winning.

Each message goes to the manager's verb, and the reply goes back. What becomes of a worker's state when it comes back,
as the same process or as a new one, is decided in core/verbs/reconnecting.py.

    Hello ──▶ current ──Step──▶ current ──Goodbye──▶ gone, with its state
                 │
                 ├── stream ends or breaks ─▶ disconnected: the manager's grace period runs
                 └── a newer stream says Hello ─▶ ABORTED; the newer one goes on
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from cache_service.core.base.errors import Superseded
from cache_service.core.cache_manager import CacheManager
from cache_service.effect_dispatcher import EffectDispatcher
from protos.v1 import cache_pb2
from rpc.interceptor import Context
from session.errors import FieldError, InvalidInput, TooMany
from session.messages import Forget, Hello, Welcome
from session.wire.hello import decode_hello, encode_welcome
from session.wire.reply import encode_order, encode_reply
from session.wire.seal import open_request, seal_response
from session.wire.step import decode_step
from session.words import Transfer, WorkerId

Requests = AsyncIterator[cache_pb2.SessionRequest]
Clock = Callable[[], int]

_log = logging.getLogger("cache_service.session")


class PeerTooSlow(FieldError):
    """The peer did not say Hello, or did not read, in time."""


class ShuttingDown(FieldError):
    """The service is about to end; the worker is to connect again."""


class StreamLimits(NamedTuple):
    max_sessions: int
    hello_timeout_s: float
    write_timeout_s: float


class Sessions:
    """All streams, and which of them is which worker's."""

    def __init__(
        self,
        manager: CacheManager,
        dispatcher: EffectDispatcher,
        clock: Clock,
        limits: StreamLimits,
        observe_step_s: Callable[[float], None],
    ) -> None:
        self.manager = manager
        self.dispatcher = dispatcher
        self.clock = clock
        self.limits = limits
        self.observe_step_s = observe_step_s
        self._current: dict[WorkerId, Session] = {}
        self._num_streams = 0
        self._closing = False
        # Set by each step, and by each stream's end.
        self.progressed = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def __len__(self) -> int:
        return len(self._current)

    async def serve(self, requests: Requests, context: Context) -> None:
        """One stream, from Hello to its end."""
        if self._closing:
            raise ShuttingDown("session", "the service is shutting down")
        if self._num_streams >= self.limits.max_sessions:
            raise TooMany("session", f"there are {self.limits.max_sessions} streams already")
        self._num_streams += 1
        self._all_ended.clear()
        try:
            session = Session(self, await self._hello(requests), requests, context)
            await session.run()
        finally:
            self._num_streams -= 1
            if not self._num_streams:
                self._all_ended.set()

    async def _hello(self, requests: Requests) -> Hello:
        try:
            async with asyncio.timeout(self.limits.hello_timeout_s):
                first = await anext(requests, None)
        except TimeoutError:
            reason = f"did not say Hello within {self.limits.hello_timeout_s:g} s"
            raise PeerTooSlow("session", reason) from None
        message = None if first is None else open_request(first)
        if message is None or message.WhichOneof("message") != "hello":
            raise InvalidInput("session", "the first message must be Hello")
        return decode_hello(message.hello)

    def enter(self, session: Session) -> None:
        """Makes this the worker's session; an older one ends."""
        older = self._current.get(session.worker_id)
        self._current[session.worker_id] = session
        if older is not None:
            older.end(Superseded("session", "a newer stream of this worker took over"))

    def leave(self, session: Session) -> bool:
        """Ends a session; returns whether it was still its worker's."""
        if self._current.get(session.worker_id) is not session:
            return False
        del self._current[session.worker_id]
        self.progressed.set()
        return True

    def end_stalled(self) -> None:
        """Cuts off peers that have taken no message for too long; asked at each tick, which is cheaper than a timer
        for each message."""
        now_s = time.monotonic()
        for session in self._current.values():
            session.end_if_stalled(now_s)

    async def forgotten(self, timeout_s: float) -> int:
        """Tells the workers what Clear calls dropped; returns how many have not confirmed it within that time.

        Those that are away are not waited for.
        """
        self.wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._current.keys().isdisjoint(self.manager.unconfirmed()):
                    self.progressed.clear()
                    await self.progressed.wait()
        return len(self.manager.unconfirmed())

    def wake(self) -> None:
        """Wakes every session after a tick: there may be orders for its worker."""
        for session in self._current.values():
            session.orders_due.set()

    async def close(self) -> None:
        """Ends every stream; the workers reconnect to the next process at this address."""
        self._closing = True
        for session in self._current.values():
            session.end(ShuttingDown("session", "the service is shutting down"))
        await self._all_ended.wait()


class Session:
    """One stream after its Hello."""

    def __init__(self, sessions: Sessions, hello: Hello, requests: Requests, context: Context) -> None:
        self.worker_id = hello.worker_id
        self.orders_due = asyncio.Event()
        self._sessions = sessions
        self._manager = sessions.manager
        self._hello = hello
        self._requests = requests
        self._context = context
        self._num_groups = len(hello.groups)
        # gRPC takes one write at a time on a stream; replies and pushed orders share it.
        self._writing = asyncio.Lock()
        self._write_began_s: float | None = None
        self._ended: asyncio.Future[FieldError] = asyncio.get_running_loop().create_future()

    def end(self, error: FieldError) -> None:
        if not self._ended.done():
            self._ended.set_result(error)

    def end_if_stalled(self, now_s: float) -> None:
        limit_s = self._sessions.limits.write_timeout_s
        if self._write_began_s is not None and now_s - self._write_began_s > limit_s:
            self.end(PeerTooSlow("session", f"took no message for {limit_s:g} s"))

    async def run(self) -> None:
        welcome = self._manager.hello(self._hello, self._sessions.clock())
        self._sessions.enter(self)
        self._sessions.dispatcher.flush()
        fields = {"worker": self.worker_id, "incarnation": self._hello.incarnation, "endpoint": self._hello.endpoint}
        _log.info("worker connected", extra=fields)
        try:
            await self._serve(welcome)
        finally:
            if self._sessions.leave(self):
                self._manager.disconnect(self.worker_id, self._hello.incarnation, self._sessions.clock())
                self._sessions.dispatcher.flush()
            _log.info("worker's stream ended", extra=fields)

    async def _serve(self, welcome: Welcome) -> None:
        orders = self._manager.take_orders(self.worker_id)
        await self._welcome(welcome)
        tasks = [asyncio.create_task(self._read(orders)), asyncio.create_task(self._push_orders())]
        ends: list[asyncio.Future[Any]] = [*tasks, self._ended]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise self._ended.result()
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _welcome(self, welcome: Welcome) -> None:
        """Writes the stream's first message, which `end` does not cut short: gRPC sends the headers with it, and were
        the write cancelled, a second time with the status. That fails, and the peer would wait for its status until
        the process ends."""
        limit_s = self._sessions.limits.write_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._write(encode_welcome(welcome))
        except TimeoutError:
            raise PeerTooSlow("session", f"took no message for {limit_s:g} s") from None

    async def _read(self, orders: tuple[Transfer | Forget, ...]) -> None:
        await self._send(orders)
        async for request in self._requests:
            if self._ended.done():
                # A newer stream speaks for the worker, maybe of a newer incarnation: this step is not that one's.
                return None
            message = open_request(request)
            kind = message.WhichOneof("message")
            if kind == "step":
                await self._step(message.step)
            elif kind == "goodbye":
                return self._goodbye()
            else:
                raise InvalidInput("session", f"{kind or 'an empty message'} is not expected here")
        return None

    async def _step(self, message: cache_pb2.Step) -> None:
        step = decode_step(message, self._manager.limits)
        started = time.perf_counter()
        reply = self._manager.step(self.worker_id, step, self._sessions.clock())
        self._sessions.observe_step_s(time.perf_counter() - started)
        self._sessions.dispatcher.flush()
        self._sessions.progressed.set()
        await self._answer(encode_reply(reply, self._num_groups))

    def _goodbye(self) -> None:
        self._sessions.leave(self)
        self._manager.goodbye(self.worker_id)
        self._sessions.dispatcher.flush()

    async def _push_orders(self) -> None:
        while True:
            await self.orders_due.wait()
            self.orders_due.clear()
            if self._ended.done():
                return
            await self._send(self._manager.take_orders(self.worker_id))

    async def _answer(self, message: cache_pb2.ManagerMessage) -> None:
        # Taken before the answer leaves: a peer that has read it finds the manager at rest.
        orders = self._manager.take_orders(self.worker_id)
        await self._write(message)
        if orders:
            await self._send(orders)

    async def _send(self, orders: tuple[Transfer | Forget, ...]) -> None:
        for order in orders:
            await self._write(encode_order(order))

    async def _write(self, message: cache_pb2.ManagerMessage) -> None:
        async with self._writing:
            self._write_began_s = time.monotonic()
            await self._context.write(seal_response(message))
            self._write_began_s = None
