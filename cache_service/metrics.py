"""Prometheus metrics of the manager, read from its stats at each scrape; named in docs/metrics.md.

Collecting runs on the event loop, between two of the manager's verbs, so the figures fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cache_service.compiled import CORE_FORM
from cache_service.core.base.stats import AttachmentStats, ManagerStats, WorkerStats
from rpc.metrics import Durations
from session.words import MissReason

PREFIX = "stemcache_cache_"
STEP_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)

# Name, help, field of the stats.
WORKER_COUNTERS = (
    ("requests", "Admitted requests.", "num_requests"),
    ("prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("matched_tokens", "Prompt tokens that were resident when admitted, reused or not.", "matched_tokens"),
    ("cached_tokens", "Prompt tokens skipped thanks to the device.", "cached_tokens"),
    ("fetched_tokens", "Prompt tokens skipped thanks to the host tier.", "fetched_tokens"),
    ("computed_tokens", "Prompt tokens left to compute.", "computed_tokens"),
    ("refusals", "Acquires and extends answered with a refusal.", "num_refusals"),
    ("restored_pages", "Pages that the worker's inventory made findable again.", "restored_pages"),
    ("restored_tokens", "Tokens of those pages.", "restored_tokens"),
    ("declined_tokens", "Prompt tokens that the host tier had and that were computed.", "declined_tokens"),
)
WORKER_GAUGES = (
    ("worker_connected", "1 while the worker's session is up.", "connected"),
    ("leases", "Sequences that hold pages.", "num_leases"),
    ("tickets", "Transfers that await their ack.", "num_tickets"),
    ("nodes", "Radix nodes.", "num_nodes"),
    ("pinned_tokens", "Cached tokens under Pin calls.", "pinned_tokens"),
    ("ghost_pages", "Evicted and cleared pages that are remembered.", "num_ghost_pages"),
    ("fetches_paused", "1 while the worker fetches nothing since its last fetches failed.", "fetches_paused"),
    ("kept_bytes", "Tokens of waiting prompts that are kept for their next acquire.", "kept_bytes"),
)
# Name and field, help: what a fetch is weighed by; 0 until it was measured.
RATES = (
    ("prefill_tokens_per_s", "Prompt tokens that the worker's device computes in a second."),
    ("fetch_bytes_per_s", "Bytes of pages that a transfer brings from the host tier in a second."),
    ("spill_bytes_per_s", "Bytes of pages that a transfer takes to the host tier in a second."),
)
HOST_COUNTERS = (
    ("host_spilled_pages", "Pages acknowledged by the host tier.", "num_spilled_pages"),
    ("host_fetched_pages", "Pages brought back from the host tier.", "num_fetched_pages"),
    ("host_missing_pages", "Pages that the host tier no longer had.", "num_missing_pages"),
    ("host_corrupt_pages", "Pages that were there and failed their checks.", "num_corrupt_pages"),
)
HOST_GAUGES = (
    ("host_rows", "Rows of the hash index.", "num_rows"),
    ("host_bytes", "Bytes that those rows stand for.", "num_bytes"),
    ("host_quota_bytes", "Bytes that the host tier may hold.", "quota_bytes"),
    ("host_breaker_open", "1 while no worker's fetch is granted, since a store fails.", "breaker_open"),
)


ATTACHMENT_COUNTERS = (
    ("attached_lookups", "Lookups of attached engines, with a lease asked for.", "num_lookups"),
    ("attached_asked_pages", "Pages that those Lookups named.", "asked_pages"),
    ("attached_usable_pages", "Of these, pages that the engine could use.", "usable_pages"),
    ("attached_reserved_pages", "Pages that attached engines were to write.", "reserved_pages"),
    ("attached_fetched_pages", "Pages that attached engines have read.", "fetched_pages"),
    ("attached_refused_pages", "Pages that found no room under the quota, or in the store.", "refused_pages"),
    ("attached_committed_pages", "Pages of attached engines that became findable.", "committed_pages"),
    ("attached_given_up_pages", "Pages that were to be written and were not.", "given_up_pages"),
    ("attached_expired_leases", "Leases that nobody released in time.", "num_expired_leases"),
    ("attached_expired_tickets", "Tickets that were not committed in time.", "num_expired_tickets"),
)
# The same for each name of an engine; `MAX_LABELS` of the manager bounds the names.
ENGINE_COUNTERS = tuple(
    (f"engine_{field.removeprefix('num_')}", text, field)
    for _, text, field in ATTACHMENT_COUNTERS
    if not field.startswith("num_expired")
)
ATTACHMENT_GAUGES = (
    ("attachments", "Engines attached to the host tier.", "num_attachments"),
    ("attached_leases", "Leases of attached engines.", "num_leases"),
    ("attached_tickets", "Tickets under which attached engines write.", "num_tickets"),
    ("attached_oldest_ticket_ms", "How long the oldest of them has been open.", "oldest_ticket_ms"),
)


# Name, help, field of a group's stats; 0 for the kinds of groups to which it does not apply.
GROUP_COUNTERS = (
    ("evicted_pages", "Pages evicted.", "num_evicted"),
    ("snapshots_taken", "Snapshots that became findable after a launch.", "num_snapshots_taken"),
    ("snapshots_restored", "Snapshots from which a launch went on.", "num_snapshots_restored"),
    ("limited_tokens", "Matched tokens that this group kept from being used.", "limited_tokens"),
)

# What an admitted request may count as; each has a series from the start, or a rate would miss its first ones.
MISS_REASONS = tuple(
    reason
    for reason in MissReason
    if (MissReason.NONE < reason < MissReason.REFUSED or reason is MissReason.BREAKER_OPEN)
    and reason is not MissReason.OTHER_SALT
)

# What a Lookup may count as.
ATTACHED_MISS_REASONS = tuple(
    reason
    for reason in MissReason
    if reason not in (MissReason.UNSPECIFIED, MissReason.OTHER_SALT, MissReason.BYPASSED, MissReason.FETCH_BUSY)
)


class ManagerCollector(Collector):
    """Turns one reading of the stats into metric families."""

    def __init__(self, read: Callable[[], ManagerStats]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        workers = [((worker.worker_id,), worker) for worker in stats.workers]
        groups = [((worker.worker_id, group.name), group) for worker in stats.workers for group in worker.groups]
        tier, attached = [((), stats.host_tier)], [((), stats.attachments)]
        yield from _families(CounterMetricFamily, WORKER_COUNTERS, ["worker"], workers)
        yield from _families(GaugeMetricFamily, WORKER_GAUGES, ["worker"], workers)
        rates = [(labels, worker.rates) for labels, worker in workers]
        yield from _families(GaugeMetricFamily, ((name, text, name) for name, text in RATES), ["worker"], rates)
        yield _hit_rate(stats.workers)
        text = "Admitted requests by why no more of them was reused."
        yield _misses("misses", text, MISS_REASONS, ["worker"], workers)
        yield _pages(stats.workers)
        yield from _families(CounterMetricFamily, GROUP_COUNTERS, ["worker", "group"], groups)
        yield from _families(CounterMetricFamily, HOST_COUNTERS, [], tier)
        yield from _families(GaugeMetricFamily, HOST_GAUGES, [], tier)
        yield from _families(CounterMetricFamily, ATTACHMENT_COUNTERS, [], attached)
        yield from _families(GaugeMetricFamily, ATTACHMENT_GAUGES, [], attached)
        text = "Lookups by why no more could be used."
        yield _misses("attached_misses", text, ATTACHED_MISS_REASONS, [], attached)
        engines = [((name,), counted) for name, counted in stats.by_engine]
        yield from _families(CounterMetricFamily, ENGINE_COUNTERS, ["engine"], engines)
        yield _misses("engine_misses", text, ATTACHED_MISS_REASONS, ["engine"], engines)
        info = GaugeMetricFamily(PREFIX + "info", "Always 1.", labels=["epoch", "policy", "core"])
        info.add_metric([stats.epoch, stats.policy, CORE_FORM], 1)
        yield info


def _families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    rows: Iterable[tuple[str, str, str]],
    names: Sequence[str],
    values: Iterable[tuple[Sequence[str], object]],
) -> Iterator[Metric]:
    """Yields a family for each row, with a series for each pair of labels and stats."""
    for name, text, field in rows:
        family = kind(PREFIX + name, text, labels=names)
        for labels, stats in values:
            family.add_metric(labels, getattr(stats, field))
        yield family


def _hit_rate(workers: Iterable[WorkerStats]) -> Metric:
    gauge = GaugeMetricFamily(
        PREFIX + "hit_rate", "Cached and fetched over prompt tokens, since the worker's start.", labels=["worker"]
    )
    for worker in workers:
        if worker.prompt_tokens:
            saved = worker.cached_tokens + worker.fetched_tokens
            gauge.add_metric([worker.worker_id], saved / worker.prompt_tokens)
    return gauge


def _misses(
    name: str,
    text: str,
    reasons: Iterable[MissReason],
    names: Sequence[str],
    values: Iterable[tuple[Sequence[str], WorkerStats | AttachmentStats]],
) -> Metric:
    misses = CounterMetricFamily(PREFIX + name, text, labels=[*names, "reason"])
    for labels, stats in values:
        counts = dict(stats.misses)
        for reason in reasons:
            misses.add_metric([*labels, reason.name.lower()], counts.get(reason, 0))
    return misses


def _pages(workers: Iterable[WorkerStats]) -> Metric:
    pages = GaugeMetricFamily(PREFIX + "pages", "Pages of a pool by state.", labels=["worker", "group", "state"])
    for worker in workers:
        for group in worker.groups:
            held = group.num_pages - group.num_free - group.num_evictable
            for state, count in (("free", group.num_free), ("evictable", group.num_evictable), ("held", held)):
                pages.add_metric([worker.worker_id, group.name, state], count)
    return pages


class StepTimes(Collector):
    """The histogram of step times."""

    def __init__(self) -> None:
        self._durations = Durations(STEP_BUCKETS)
        self.observe = self._durations.observe

    def collect(self) -> Iterator[Metric]:
        text = "Time that the manager takes for one Step, without transport and codec."
        buckets, sum_s = self._durations.rows(), self._durations.sum_s
        yield HistogramMetricFamily(PREFIX + "step_seconds", text, buckets=buckets, sum_value=sum_s)


def step_observer(registry: CollectorRegistry) -> Callable[[float], None]:
    """Returns a function that takes how many seconds the manager took for one Step."""
    times = StepTimes()
    registry.register(times)
    return times.observe


class _ReadCounter(Collector):
    """A counter whose value is kept elsewhere."""

    def __init__(self, name: str, text: str, read: Callable[[], int]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self._read())


def counter_of(registry: CollectorRegistry, name: str, text: str, read: Callable[[], int]) -> None:
    """Registers a counter whose value is read at each scrape."""
    registry.register(_ReadCounter(PREFIX + name, text, read))


def gauge_of(registry: CollectorRegistry, name: str, text: str, read: Callable[[], float]) -> None:
    """Registers a gauge whose value is read at each scrape."""
    Gauge(PREFIX + name, text, registry=registry).set_function(read)
