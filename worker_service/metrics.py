"""The worker's Prometheus metrics: counters that the engine moves, and gauges that are read at scrape time.

Names and meanings are listed in docs/metrics.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from worker_service.core.sequence import Timing, Usage
from worker_service.observer import Observer

PREFIX = "stemcache_worker_"
_SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OUTCOMES = ("finished", "failed", "aborted")
ORIGINS = ("cached", "fetched", "computed", "generated")
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class Load(NamedTuple):
    """What the engine has at hand, read at scrape time."""

    running: int
    waiting: int
    held: int
    connected: bool
    transfers: int


class WorkerMetrics(Observer):
    """Counters that the engine moves, and gauges read from `load`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._requests = self._counter("requests", "Requests by how they ended.", "outcome")
        self._tokens = self._counter("tokens", "Tokens by origin; a prompt's count at its end.", "origin")
        self._matched_tokens = self._counter("matched_tokens", "Prompt tokens whose KV was there at admission.")
        self._aborted_tokens = self._counter("aborted_tokens", "Tokens generated for aborted and failed requests.")
        self._launched_tokens = self._counter("launched_tokens", "Tokens computed by forward passes.")
        self._failed_launches = self._counter("failed_launches", "Forward passes that raised.")
        self._preemptions = self._counter("preemptions", "Preemptions of requests that have ended.")
        self._lost_sessions = self._counter("lost_sessions", "Times that the session broke.")
        self._own_pages = self._counter("own_pages", "Pages taken without the cache service, while it did not reply.")
        self._host_bytes = self._counter("host_tier_bytes", "Bytes moved to and from the host tier.", "operation")
        self._host_failures = self._counter("host_tier_failures", "Calls that the host tier failed.", "operation")
        self._step_s = self._histogram("step_seconds", "Round trip of a step to the cache service.", _SHORT)
        self._launch_s = self._histogram("launch_seconds", "Device time of a forward pass.", _LONG)
        self._idle_s = self._counter("device_idle_seconds", "Time that the device waited while there was work.")
        self._first_token_s = self._histogram("first_token_seconds", "From arrival to the first token.", _LONG)
        self._queued_s = self._histogram("queued_seconds", "From arrival to the first launch.", _LONG)
        self._end_to_end_s = self._histogram("end_to_end_seconds", "From arrival to the last token.", _WHOLE)
        self._inter_token_s = TokenHistogram(PREFIX + "inter_token_seconds", "Between two tokens of a request.", _TOKEN)
        registry.register(self._inter_token_s)
        # A rate over a counter that appears with its first event misses that event.
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        for origin in ORIGINS:
            self._tokens.labels(origin)
        self._generated_tokens = self._tokens.labels("generated")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)

    def watch(self, load: Callable[[], Load]) -> None:
        self._registry.register(_LoadCollector(load))

    def host_tier(self, operation: str, num_bytes: int, *, failed: bool) -> None:
        """Called from the mover's threads; prometheus counters are safe there."""
        self._host_bytes.labels(operation).inc(num_bytes)
        if failed:
            self._host_failures.labels(operation).inc()

    def stepped(self, seconds: float) -> None:
        self._step_s.observe(seconds)

    def launched(self, num_tokens: int, busy_s: float, idle_s: float) -> None:
        self._launched_tokens.inc(num_tokens)
        self._launch_s.observe(busy_s)
        self._idle_s.inc(idle_s)

    def launch_failed(self) -> None:
        self._failed_launches.inc()

    def generated(self, num_tokens: int, inter_token_s: Sequence[float]) -> None:
        self._generated_tokens.inc(num_tokens)
        self._inter_token_s.observe_all(inter_token_s)

    def finished(self, usage: Usage, timing: Timing) -> None:
        self._ended("finished", usage)
        self._first_token_s.observe(timing.time_to_first_token_s)
        self._queued_s.observe(timing.queued_s)
        self._end_to_end_s.observe(timing.end_to_end_s)

    def failed(self, usage: Usage | None) -> None:
        self._gave_up("failed", usage)

    def aborted(self, usage: Usage | None) -> None:
        self._gave_up("aborted", usage)

    def _gave_up(self, outcome: str, usage: Usage | None) -> None:
        self._ended(outcome, usage)
        if usage is not None:
            self._aborted_tokens.inc(usage.generated_tokens)

    def _ended(self, outcome: str, usage: Usage | None) -> None:
        self._requests.labels(outcome).inc()
        if usage is None:
            return
        self._tokens.labels("cached").inc(usage.cached_tokens)
        self._tokens.labels("fetched").inc(usage.fetched_tokens)
        self._tokens.labels("computed").inc(usage.computed_tokens)
        self._matched_tokens.inc(usage.matched_tokens)
        self._preemptions.inc(usage.num_preemptions)

    def session_lost(self) -> None:
        self._lost_sessions.inc()

    def took_pages(self, num_pages: int) -> None:
        self._own_pages.inc(num_pages)


class TokenHistogram(Collector):
    """A histogram that takes the values of a whole launch at once; the library's costs 3 us a value."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe_all(self, values: Sequence[float]) -> None:
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += sum(values)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = (*map(floatToGoString, self._bounds), "+Inf")
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class _LoadCollector(Collector):
    def __init__(self, load: Callable[[], Load]) -> None:
        self._load = load

    def collect(self) -> Iterator[GaugeMetricFamily]:
        load = self._load()
        texts = {
            "running": "Sequences that hold pages.",
            "waiting": "Requests in the queue.",
            "held": "Waiting requests that a sibling's prefix is awaited for.",
            "connected": "1 while there is a session with the cache service.",
            "transfers": "Page transfers under way.",
        }
        for name, text in texts.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=float(getattr(load, name)))
