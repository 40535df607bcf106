"""Counts and times the calls of a server, by method and status code.

Unknown methods never get here, so a peer cannot invent label values.
"""

from __future__ import annotations

import asyncio
import time
from functools import lru_cache
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rpc.interceptor import Call, Context, Proceed

BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


def code_name(context: Context) -> str:
    """Returns the name of a finished call's status code."""
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _CODE_NAMES.get(int(code or 0), "UNKNOWN")


class RpcMetrics:
    """An around that feeds three Prometheus families."""

    def __init__(self, registry: CollectorRegistry) -> None:
        handled = Counter("stemcache_rpc_handled", "Calls that were answered.", ["method", "code"], registry=registry)
        duration = Histogram(
            "stemcache_rpc_duration_seconds",
            "Time from a unary call's start to its answer.",
            ["method"],
            buckets=BUCKETS,
            registry=registry,
        )
        in_flight = Gauge("stemcache_rpc_in_flight", "Calls and streams being served.", ["method"], registry=registry)
        # One child for each method and code: `labels` costs several us a call, a child's `inc` half of one.
        self._handled_of = lru_cache(handled.labels)
        self._duration_of = lru_cache(duration.labels)
        self._in_flight_of = lru_cache(in_flight.labels)

    async def __call__(self, call: Call, proceed: Proceed) -> Any:
        in_flight = self._in_flight_of(call.method)
        in_flight.inc()
        started = time.perf_counter()
        cancelled = False
        try:
            return await proceed()
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            in_flight.dec()
            if call.is_unary:
                # A stream's length says how long its peer lived, not how fast we are.
                self._duration_of(call.method).observe(time.perf_counter() - started)
            self._handled_of(call.method, "CANCELLED" if cancelled else code_name(call.context)).inc()
