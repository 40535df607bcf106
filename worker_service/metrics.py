"""The worker's Prometheus metrics: what the engine tells is counted, what it knows is read when somebody asks.

Knows no HTTP. Names and meanings are listed in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from worker_service.core.sequence import Timing, Usage
from worker_service.observer import Observer

PREFIX = "stemcache_worker_"
_SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
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
        self._tokens = self._counter("tokens", "Tokens of finished requests by origin.", "origin")
        self._launched_tokens = self._counter("launched_tokens", "Tokens computed by forward passes.")
        self._failed_launches = self._counter("failed_launches", "Forward passes that raised.")
        self._preemptions = self._counter("preemptions", "Preemptions of finished requests.")
        self._lost_sessions = self._counter("lost_sessions", "Times that the session broke.")
        self._host_bytes = self._counter("host_tier_bytes", "Bytes moved to and from the host tier.", "operation")
        self._host_failures = self._counter("host_tier_failures", "Calls that the host tier failed.", "operation")
        self._step_s = self._histogram("step_seconds", "Round trip of a step to the cache service.", _SHORT)
        self._launch_s = self._histogram("launch_seconds", "Duration of a forward pass.", _LONG)
        self._first_token_s = self._histogram("first_token_seconds", "From arrival to the first token.", _LONG)
        self._queued_s = self._histogram("queued_seconds", "From arrival to the first launch.", _LONG)

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

    def launched(self, num_tokens: int, seconds: float) -> None:
        self._launched_tokens.inc(num_tokens)
        self._launch_s.observe(seconds)

    def launch_failed(self) -> None:
        self._failed_launches.inc()

    def finished(self, usage: Usage, timing: Timing) -> None:
        self._requests.labels("finished").inc()
        self._tokens.labels("cached").inc(usage.cached_tokens)
        self._tokens.labels("fetched").inc(usage.fetched_tokens)
        self._tokens.labels("computed").inc(usage.computed_tokens)
        self._tokens.labels("generated").inc(usage.generated_tokens)
        self._preemptions.inc(usage.num_preemptions)
        self._first_token_s.observe(timing.time_to_first_token_s)
        self._queued_s.observe(timing.queued_s)

    def failed(self) -> None:
        self._requests.labels("failed").inc()

    def aborted(self) -> None:
        self._requests.labels("aborted").inc()

    def session_lost(self) -> None:
        self._lost_sessions.inc()


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
