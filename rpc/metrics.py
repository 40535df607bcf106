"""Counts and times the calls of a server, by method and status code.

Knows no service. Unknown methods never get here, so a peer cannot invent label values.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rpc.interceptor import Call, Context, Proceed

BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

_BOUNDS = [*map(floatToGoString, BUCKETS), "+Inf"]
_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


def code_name(context: Context) -> str:
    """The name of the code that a finished call was answered with."""
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _CODE_NAMES.get(int(code or 0), "UNKNOWN")


class _Method:
    """What happened to one method's calls."""

    __slots__ = ("counts", "handled", "in_flight", "sum_s")

    def __init__(self) -> None:
        self.in_flight = 0
        self.handled: Counter[str] = Counter()  # by code
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum_s += seconds


class RpcMetrics(Collector):
    """An around that feeds three Prometheus families. prometheus_client's own are made for threads and cost more."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._methods: defaultdict[str, _Method] = defaultdict(_Method)
        registry.register(self)

    async def __call__(self, call: Call, proceed: Proceed) -> Any:
        method = self._methods[call.method]
        method.in_flight += 1
        started = time.perf_counter()
        cancelled = False
        try:
            return await proceed()
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            method.in_flight -= 1
            if call.is_unary:
                # A stream's length says how long its peer lived, not how fast we are.
                method.observe(time.perf_counter() - started)
            method.handled["CANCELLED" if cancelled else code_name(call.context)] += 1

    def collect(self) -> Iterator[Metric]:
        text = "Time from a unary call's start to its answer."
        handled = CounterMetricFamily("stemcache_rpc_handled", "Calls that were answered.", labels=["method", "code"])
        duration = HistogramMetricFamily("stemcache_rpc_duration_seconds", text, labels=["method"])
        in_flight = GaugeMetricFamily("stemcache_rpc_in_flight", "Calls and streams being served.", labels=["method"])
        for name, method in self._methods.items():
            for code, count in method.handled.items():
                handled.add_metric([name, code], count)
            if any(method.counts):
                buckets = list(zip(_BOUNDS, accumulate(method.counts), strict=True))
                duration.add_metric([name], buckets, method.sum_s)
            in_flight.add_metric([name], method.in_flight)
        yield from (handled, duration, in_flight)
