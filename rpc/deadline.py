"""Ends unary calls that take longer than their caller, or this server, allows.

Knows no method; exceptions from the default are an argument. Streams live as long as their peers want.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc

from rpc.interceptor import Around, Call


def deadlines(default_s: float, by_method: Mapping[str, float] | None = None) -> Around:
    """At most `default_s` for each unary call; `by_method` maps full method names to other maxima."""
    maxima = dict(by_method or {})

    def around(call: Call) -> AbstractAsyncContextManager[None]:
        return _limited(call, maxima.get(call.method, default_s))

    return around


@asynccontextmanager
async def _limited(call: Call, maximum_s: float) -> AsyncIterator[None]:
    if not call.is_unary:
        yield
        return
    remaining = call.context.time_remaining()
    limit = maximum_s if remaining is None else min(maximum_s, remaining)
    try:
        async with asyncio.timeout(limit) as timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        await call.context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"not done within {limit:.3f} s")
