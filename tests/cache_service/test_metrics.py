"""What a scrape shows, and that each name stands in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cache_service.core.base.stats import AttachmentStats, GroupStats, HostTierStats, ManagerStats, WorkerStats
from cache_service.core.base.types import FetchPolicy, SpillPolicy
from cache_service.metrics import ManagerCollector, counter_of, step_observer
from protos.v1 import cache_pb2
from session.words import GroupKind, MissReason, WorkerId
from tests.cache_service.peer import Client, started
from tests.session.messages import acquire, publish, release, tokens

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def sample(client: Client, name: str, **labels: str) -> float | None:
    return client.service.registry.get_sample_value(name, labels)


async def test_a_scrape_shows_what_the_manager_knows() -> None:
    async with started() as client:
        peer = await client.connected()
        for number in (1, 2):
            await peer.step(acquires=[acquire(number, tokens(40))])
            await peer.step(publishes=[publish(number, 40)], releases=[release(number)])
        await client.stub.Stats(cache_pb2.StatsRequest())
        worker = {"worker": "w1"}
        assert sample(client, "stemcache_cache_requests_total", **worker) == 2
        assert sample(client, "stemcache_cache_cached_tokens_total", **worker) == 32
        assert sample(client, "stemcache_cache_matched_tokens_total", **worker) == 32
        assert sample(client, "stemcache_cache_hit_rate", **worker) == 0.4
        assert sample(client, "stemcache_cache_misses_total", **worker, reason="page_tail") == 1
        assert sample(client, "stemcache_cache_misses_total", **worker, reason="evicted") == 0
        assert sample(client, "stemcache_cache_misses_total", **worker, reason="other_salt") is None
        pages = {state: _pages(client, state) for state in ("free", "evictable", "held")}
        assert pages == {"free": 62, "evictable": 2, "held": 0}
        assert sample(client, "stemcache_cache_step_seconds_count") == 4
        stats = {"method": "/stemcache.v1.PrefixCache/Stats"}
        assert sample(client, "stemcache_rpc_handled_total", **stats, code="OK") == 1
        assert sample(client, "stemcache_rpc_in_flight", method="/stemcache.v1.PrefixCache/Session") == 1
        assert sample(client, "stemcache_cache_sessions") == 1


def test_a_step_counts_in_its_bucket_and_in_those_above() -> None:
    registry = CollectorRegistry()
    observe = step_observer(registry)
    for seconds in (0.00003, 0.0001, 0.0015, 2.0):
        observe(seconds)
    name = "stemcache_cache_step_seconds"
    buckets = {le: registry.get_sample_value(name + "_bucket", {"le": le}) for le in ("5e-05", "0.0001", "0.5", "+Inf")}
    assert buckets == {"5e-05": 1, "0.0001": 2, "0.5": 3, "+Inf": 4}
    assert registry.get_sample_value(name + "_count") == 4
    assert registry.get_sample_value(name + "_sum") == pytest.approx(2.00163)


def test_a_counter_that_somebody_else_keeps_is_read_at_each_scrape() -> None:
    registry, counts = CollectorRegistry(), [3, 5]
    counter_of(registry, "dropped", "Dropped.", lambda: counts.pop(0))
    name = "stemcache_cache_dropped_total"
    assert [registry.get_sample_value(name) for _ in range(2)] == [3, 5]


def _pages(client: Client, state: str) -> float | None:
    return sample(client, "stemcache_cache_pages", worker="w1", group="full", state=state)


def test_every_metric_stands_in_the_docs() -> None:
    groups = GroupStats("full", GroupKind.FULL, 10, 3, 2, 1), GroupStats("state", GroupKind.STATE, 9, 3, 2, 1, 7, 6, 5)
    worker = WorkerStats(WorkerId("w1"), "", "", "", True, groups, *([1] * 11), misses=((MissReason.EVICTED, 1),))
    host = HostTierStats(0, 0, 0, 0, 0, 0, 0, True, SpillPolicy.SELECTIVE, FetchPolicy.AUTO)
    stats = ManagerStats("e", "lru", (worker,), host, by_engine=(("vllm", AttachmentStats()),))
    families = list(ManagerCollector(lambda: stats).collect())
    documented = DOCS.read_text()
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{name}`" in documented, name
        assert family.samples, name


def test_whose_fetches_are_paused_is_told_by_worker() -> None:
    misses = ((MissReason.BREAKER_OPEN, 2),)
    workers = [
        WorkerStats(
            WorkerId(name), "", "", "", True, (), *([1] * 11), misses=misses if paused else (), fetches_paused=paused
        )
        for name, paused in (("w1", True), ("w2", False))
    ]
    host = HostTierStats(0, 0, 0, 0, 0, 0, 0, False, SpillPolicy.SELECTIVE, FetchPolicy.AUTO)
    registry = CollectorRegistry()
    registry.register(ManagerCollector(lambda: ManagerStats("e", "lru", tuple(workers), host)))
    for name, paused, missed in (("w1", 1, 2), ("w2", 0, 0)):
        labels = {"worker": name}
        assert registry.get_sample_value("stemcache_cache_fetches_paused", labels) == paused
        labels |= {"reason": "breaker_open"}
        assert registry.get_sample_value("stemcache_cache_misses_total", labels) == missed
    assert registry.get_sample_value("stemcache_cache_host_breaker_open") == 0


def test_snapshots_are_counted_by_group() -> None:
    groups = (
        GroupStats("full", GroupKind.FULL, 10, 3, 2, 1),
        GroupStats("near", GroupKind.WINDOW, 10, 3, 2, 1, limited_tokens=4),
        GroupStats("state", GroupKind.STATE, 9, 3, 2, 1, 7, 6, 5),
    )
    worker = WorkerStats(WorkerId("w1"), "", "", "", True, groups, *([1] * 11), misses=())
    host = HostTierStats(0, 0, 0, 0, 0, 0, 0, True, SpillPolicy.SELECTIVE, FetchPolicy.AUTO)
    registry = CollectorRegistry()
    registry.register(ManagerCollector(lambda: ManagerStats("e", "lru", (worker,), host)))

    def read(name: str, group: str) -> float | None:
        return registry.get_sample_value(f"stemcache_cache_{name}_total", {"worker": "w1", "group": group})

    names = ("snapshots_taken", "snapshots_restored", "limited_tokens")
    assert [read(name, "state") for name in names] == [7, 6, 5]
    assert [read(name, "near") for name in names] == [0, 0, 4]
    assert [read(name, "full") for name in names] == [0, 0, 0]
