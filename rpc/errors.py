"""Ends a failed call with a status: by a table for known errors, INTERNAL without details for all others.

The table is an argument.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio

from rpc.interceptor import Call, Middleware, Proceed, UndecodableRequest
from rpc.request_id import current_request_id

ErrorTable = Mapping[type[Exception], grpc.StatusCode]

# What a read or a write raises when its peer has left, if it did so a moment before the call counts as cancelled.
_PEER_GONE = (grpc.aio.InternalError, grpc.aio.UsageError)

# Details travel in HTTP/2 trailers, which peers cap at 8 KiB and which percent-encoding may triple.
MAX_DETAILS = 1_000

_log = logging.getLogger("rpc.errors")


def status_of(error: Exception, table: ErrorTable) -> grpc.StatusCode | None:
    """Returns the code of the error's class, or of its nearest base class in the table; None for neither."""
    if isinstance(error, UndecodableRequest):
        return grpc.StatusCode.INVALID_ARGUMENT
    return next((table[kind] for kind in type(error).__mro__ if kind in table), None)


def clipped(details: str) -> str:
    return details if len(details) <= MAX_DETAILS else details[: MAX_DETAILS - 1] + "…"


def errors_to_status(table: ErrorTable) -> Middleware:
    """Returns a middleware that ends failed calls with `table`'s codes."""

    async def middleware(call: Call, proceed: Proceed) -> Any:
        try:
            return await proceed()
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            if call.context.cancelled() or isinstance(error, _PEER_GONE):
                _give_up(call, error)
            try:
                await _abort(call, error, table)
            except _PEER_GONE:
                _give_up(call, error)

    return middleware


def _give_up(call: Call, error: Exception) -> NoReturn:
    """Ends a call whose peer has left: a write to it failed, maybe that of the status, so no status can be sent."""
    _log.debug("call ended by its peer", extra={"method": call.method})
    raise asyncio.CancelledError from error


async def _abort(call: Call, error: Exception, table: ErrorTable) -> NoReturn:
    code = status_of(error, table)
    if code is None:
        _log.exception("call failed unexpectedly", extra={"method": call.method})
        await call.context.abort(grpc.StatusCode.INTERNAL, f"internal error; request id {current_request_id()}")
    details = clipped(str(error))
    _log.info("call refused", extra={"method": call.method, "code": code.name, "details": details})
    await call.context.abort(code, details)
