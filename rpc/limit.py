"""Bounds the calls that a server handles at once. A call counts until its handler ends.

gRPC's own bound counts a call until its peer has taken the last byte, so peers that never read would use it up. Health
checks and reflection do not count: a busy server is still a healthy one.
"""

from __future__ import annotations

from typing import Any

import grpc

from rpc.interceptor import Call, Proceed

FREE_PREFIX = "/grpc."


class CallLimit:
    """Middleware that refuses calls beyond the limit with RESOURCE_EXHAUSTED."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    async def __call__(self, call: Call, proceed: Proceed) -> Any:
        if call.method.startswith(FREE_PREFIX):
            return await proceed()
        if self._count >= self._most:
            await call.context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._most} calls are being served already")
        self._count += 1
        try:
            return await proceed()
        finally:
            self._count -= 1
