"""One gRPC stream of a session with the cache service, from its first write to its end.

One reader task sorts what arrives: replies to the calls that wait for them, orders to a bounded queue. Every failure is
a SessionLost but for a Hello that is refused, a SessionRefused. An error of the reader itself ends the stream as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TypeVar

import grpc
import grpc.aio

from protos.v1 import cache_pb2, cache_pb2_grpc
from session.errors import FieldError
from session.messages import Forget
from session.wire.reply import decode_order
from session.wire.seal import CHECKSUM_FIELD, open_response, seal_request
from session.words import Transfer
from worker_service.core.errors import SessionLost, SessionRefused, StepRejected
from worker_service.session_checks import PoolCheck
from worker_service.tasks import watched

_FINAL_CODES = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED, grpc.StatusCode.UNIMPLEMENTED}
# What a repeated step may meet again; the other codes speak of the link, or of a service that ends.
_STEP_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
}
_Reply = TypeVar("_Reply")
_Key = tuple[str, int]
_StreamCall = grpc.aio.StreamStreamCall[cache_pb2.SessionRequest, cache_pb2.SessionResponse]
_log = logging.getLogger(__name__)


class OrderQueue:
    """Orders of the present stream that wait for the engine; `news` is set by an order and by the stream's end."""

    def __init__(self, max_orders: int) -> None:
        self.news = asyncio.Event()
        self.waiting: deque[Transfer | Forget] = deque()
        self._max_orders = max_orders

    def put(self, order: Transfer | Forget) -> None:
        if len(self.waiting) >= self._max_orders:
            raise SessionLost(f"more than {self._max_orders} orders wait")
        self.waiting.append(order)
        self.news.set()


class SessionStream:
    """`check` says which replies and orders cannot be right for this worker's pools."""

    def __init__(self, channel: grpc.aio.Channel, orders: OrderQueue, check: PoolCheck, reply_timeout_s: float) -> None:
        self._channel = channel
        self._orders = orders
        self.check = check
        self._reply_timeout_s = reply_timeout_s
        self._waiting: dict[_Key, asyncio.Future[cache_pb2.ManagerMessage]] = {}
        self._lost: BaseException | None = None
        self._is_loss_told = False
        self._welcomed = False
        # The generated stub is typed for both the blocking and the asyncio channel.
        stub = cache_pb2_grpc.PrefixCacheStub(channel)
        self._call: _StreamCall = stub.Session()
        self._reader = watched(self._read(), "session-reader", self._end)

    async def ask(self, key: _Key, message: cache_pb2.WorkerMessage) -> cache_pb2.ManagerMessage:
        """Sends a message and returns the reply to it, which `key` names. Raises what ended the stream."""
        if self._lost is not None:
            raise self._lost
        reply = asyncio.get_running_loop().create_future()
        self._waiting[key] = reply
        try:
            async with asyncio.timeout(self._reply_timeout_s):
                await self._call.write(seal_request(message))
                return await asyncio.shield(reply)
        except TimeoutError as error:
            lost = SessionLost(f"no reply to {key[0]} within {self._reply_timeout_s} s")
            self._end(lost)
            raise lost from error
        except asyncio.CancelledError:
            if self._lost is None or _is_cancelled():
                raise
            # gRPC's write raises this also where the reader has cancelled the call.
            raise self._lost from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            # The reader learns the status; what it found says more than a failed write does.
            await asyncio.wait({self._reader}, timeout=self._reply_timeout_s)
            raise self._lost or SessionLost(str(error)) from error
        finally:
            self._waiting.pop(key, None)
            _forget(reply)

    def tell_loss_once(self) -> None:
        """Raises the error that ended this stream after its Welcome, once."""
        if self._lost is not None and self._welcomed and not self._is_loss_told:
            self._is_loss_told = True
            raise self._lost

    async def say_goodbye(self) -> None:
        if self._lost is not None:
            return
        try:
            async with asyncio.timeout(self._reply_timeout_s):
                await self._call.write(seal_request(cache_pb2.WorkerMessage(goodbye=cache_pb2.Goodbye())))
                await self._call.done_writing()
                await asyncio.wait({self._reader})
        except asyncio.CancelledError:
            if self._lost is None or _is_cancelled():
                raise
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
            async for response in self._call:
                self._sort(open_response(response))
            self._end(SessionLost("the cache service ended the stream"))
        except grpc.aio.AioRpcError as error:
            self._end(self._loss(error))
        except (SessionLost, FieldError) as error:
            self._end(error if isinstance(error, SessionLost) else SessionLost(str(error)))
            self._call.cancel()

    def _loss(self, error: grpc.aio.AioRpcError) -> Exception:
        code, details = error.code(), error.details() or ""
        text = f"{code.name}: {details}"
        if details.startswith(CHECKSUM_FIELD):
            return SessionLost(text)
        if not self._welcomed and code in _FINAL_CODES:
            return SessionRefused(text)
        return StepRejected(text) if self._welcomed and code in _STEP_CODES else SessionLost(text)

    def _sort(self, message: cache_pb2.ManagerMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "order":
            self._take_order(message.order)
        elif kind == "step_reply":
            self._resolve(("step", message.step_reply.step_id), message)
        elif kind == "welcome":
            self._welcomed = True
            self._resolve(("welcome", 0), message)
        else:
            raise SessionLost("the cache service said something that this worker does not know")

    def _resolve(self, key: _Key, message: cache_pb2.ManagerMessage) -> None:
        reply = self._waiting.get(key)
        if reply is None or reply.done():
            raise SessionLost(f"{key[0]} {key[1]} got a reply but was not asked")
        reply.set_result(message)

    def _take_order(self, message: cache_pb2.Order) -> None:
        order = decode_order(message)
        if isinstance(order, Transfer):
            self.check.order(order)
        self._orders.put(order)

    def _end(self, lost: BaseException) -> None:
        if self._lost is None:
            self._lost = lost
            self._orders.news.set()
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(self._lost)


def _is_cancelled() -> bool:
    """Returns whether the running task was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _forget(reply: asyncio.Future[_Reply]) -> None:
    """Marks a failure as seen, so that asyncio does not report it as unhandled."""
    if reply.done() and not reply.cancelled():
        reply.exception()
