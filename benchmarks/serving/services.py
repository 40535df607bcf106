"""The cache service and one worker as `stemcache up` starts them, without a host tier, and the worker's counters."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.figures import Counters
from cli.client import StemcacheClient
from cli.cluster import Cluster, ClusterOptions, start_cluster
from cli.supervisor import Supervisor
from protos.v1 import worker_pb2

PREFIXES = ("STEMCACHE_CACHE_", "STEMCACHE_WORKER_")
LAUNCHES = "stemcache_worker_launch_seconds_count"
# The device's time only where the worker counts its idle time too; else the time that the host spent on a launch.
LAUNCH_SECONDS = "stemcache_worker_launch_seconds_sum"
IDLE_SECONDS = "stemcache_worker_device_idle_seconds_total"
METRICS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Services:
    """What runs. `start_s`: from nothing to serving, the weights read."""

    supervisor: Supervisor
    cluster: Cluster
    described: worker_pb2.DescribeResponse
    start_s: float

    @property
    def worker(self) -> str:
        return self.cluster.workers[0]

    @property
    def pool_tokens(self) -> int:
        """Tokens that the smallest pool of pages holds."""
        return min(group.num_pages for group in self.described.groups) * self.described.page_tokens

    async def counters(self) -> Counters:
        """The scrape keeps the worker's event loop busy for a millisecond or two."""
        sent_s = time.monotonic()
        text = await asyncio.to_thread(_scrape, self.cluster.worker_metrics[0])
        return read_counters(text, (sent_s + time.monotonic()) / 2)

    @asynccontextmanager
    async def cache_service_stopped(self) -> AsyncIterator[None]:
        """Stopped as by SIGSTOP, and going on at the end."""
        pid = self.supervisor.children["cache"].pid
        assert pid is not None, "the cache service runs"
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


def service_variables() -> dict[str, str]:
    """Settings of the services in this process' environment."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}


@asynccontextmanager
async def serving(
    model: str, device: str, settings: Mapping[str, str], logs: Path, report: Callable[[str], None]
) -> AsyncIterator[Services]:
    """`settings`: variables of the services."""
    options = ClusterOptions(
        model,
        num_workers=1,
        host_tier="none",
        pool_mb=int(settings.get("STEMCACHE_WORKER_POOL_MB", 0)),
        device=device,
        policy=settings.get("STEMCACHE_CACHE_POLICY", "adaptive"),
        environ=settings,
    )
    start_s = time.monotonic()
    async with Supervisor(logs, report) as supervisor:
        cluster = await start_cluster(supervisor, options, report)
        took_s = time.monotonic() - start_s
        async with StemcacheClient(cluster.cache, cluster.workers) as client:
            described = await client.describe(cluster.workers[0])
        yield Services(supervisor, cluster, described, took_s)


def read_counters(metrics: str, at_s: float) -> Counters:
    """Returns what the text of a scrape says."""
    pairs = (line.rpartition(" ") for line in metrics.splitlines() if line and not line.startswith("#"))
    values = {name: float(value) for name, _, value in pairs}
    idle_s = values.get(IDLE_SECONDS)
    return Counters(at_s, values.get(LAUNCHES), None if idle_s is None else values.get(LAUNCH_SECONDS), idle_s)


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=METRICS_TIMEOUT_S) as response:
        text: str = response.read().decode()
    return text
