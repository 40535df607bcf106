"""Ends calls that take longer than their caller, or this server, allows.

Exceptions from the default are an argument. A stream without one ends when its peer ends it. A stream whose peer
does not read is given up: all that it holds is freed, and the status follows when the peer has taken the last message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import grpc

from rpc.interceptor import Call, Middleware, Proceed

_log = logging.getLogger("rpc.deadline")


def deadlines(default_s: float, by_method: Mapping[str, float | None] | None = None) -> Middleware:
    """Returns a middleware: `default_s` for a unary call, other limits `by_method` (full names), for streams too.

    None is for methods that never wait: no timer could end them, and each costs such a call some 25 us.
    """
    maxima = dict(by_method or {})

    async def middleware(call: Call, proceed: Proceed) -> Any:
        maximum_s = maxima.get(call.method, default_s if call.is_unary else None)
        return await (proceed() if maximum_s is None else _limited(call, proceed, maximum_s))

    return middleware


async def _limited(call: Call, proceed: Proceed, maximum_s: float) -> Any:
    remaining = call.context.time_remaining()
    limit = maximum_s if remaining is None else min(maximum_s, remaining)
    try:
        async with asyncio.timeout(limit) as timeout:
            return await proceed()
    except TimeoutError:
        if not timeout.expired():
            raise
        status = (grpc.StatusCode.DEADLINE_EXCEEDED, f"not done within {limit:.3f} s")
        if call.progress.is_writing:
            _log.info("given up: its peer does not read", extra={"method": call.method})
            call.progress.late = status
            raise asyncio.CancelledError from None
        await call.context.abort(*status)
