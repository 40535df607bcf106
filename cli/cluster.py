"""What `stemcache up` and the demo run: Redis, the cache service and workers, as children of one supervisor.

With host_tier.py the only place of the cli that knows the services' options.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cli.addresses import LOOPBACK, CannotStart, Listens, choose, connectable, free_port
from cli.client import wait_serving
from cli.devices import count_gpus, placements
from cli.host_tier import HostTier, choose_host_tier, start_host_tier
from cli.preflight import (
    check_cache_settings,
    check_device,
    check_model,
    check_packages,
    check_worker_settings,
    start_limit_s,
    weights_bytes,
)
from cli.supervisor import Child, ChildSpec, Supervisor

# Below the supervisor's own grace, so that a drained service ends before it is killed.
DRAIN_TIMEOUT_S = 5
PROGRESS_S = 10.0
# Settings that depend on what else is started.
DECIDED_HERE = ("STEMCACHE_WORKER_WORKER_ID", "STEMCACHE_WORKER_CACHE")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Ports of 0 take free ones; they are drawn once, so that a child that comes back is found where it was. None: what
    a variable says, else the usual port.

    `pool_mb` of 0 leaves it to the worker: its share of the GPU's free memory, or a fixed size on a CPU; `page_tokens`
    of 0 to the model. `environ` has the variables of the services that are to count; options beat them.
    """

    model: str
    num_workers: int = 2
    cache_port: int | None = 0
    worker_port: int | None = 0
    host_tier: str = "auto"
    host_mb: int = 1024
    pool_mb: int = 0
    page_tokens: int = 0
    device: str = "auto"
    policy: str = "adaptive"
    cache_env: dict[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Addresses of what runs, and where its workers spill to."""

    cache: str
    workers: tuple[str, ...]
    worker_names: tuple[str, ...]
    cache_metrics: str
    cache_admin: str
    worker_admins: tuple[str, ...]
    worker_metrics: tuple[str, ...]
    tier: HostTier

    @property
    def host_tier(self) -> str:
        return self.tier.kind

    @property
    def shared_tier(self) -> bool:
        """Returns whether the workers reach each other's spilled pages."""
        return self.tier.kind == "redis"


async def start_cluster(supervisor: Supervisor, options: ClusterOptions, report: Callable[[str], None]) -> Cluster:
    """Starts everything in order, each child serving before the next one starts (workers side by side).

    What can be known before is checked before: nothing has started then.

    Raises:
        CannotStart: a port is taken, a setting, the model or the device is wrong, or there is no Redis though one was
            asked for.
        ChildFailed: a child ended or did not serve in time.
    """
    check_packages()
    check_device(options.device)
    chosen = choose(options.num_workers, options.cache_port, options.worker_port, options.environ)
    tier = choose_host_tier(options.host_tier, options.host_mb, options.environ, report)
    cache_spec = _cache_child(chosen.cache, tier, options)
    check_cache_settings({**os.environ, **cache_spec.env})
    names = tuple(f"worker-{i + 1}" for i in range(options.num_workers))
    cache = connectable(chosen.cache.calls)
    specs = [
        _worker_child(name, listens, cache, tier, options, {})
        for name, listens in zip(names, chosen.workers, strict=True)
    ]
    for spec in specs:
        check_worker_settings({**os.environ, **spec.env})
    # The last one, as it may take longer than all others.
    check_model(options.model)
    await start_host_tier(supervisor, tier, report)
    report("starting the cache service")
    await supervisor.start(cache_spec)
    gpus = await asyncio.to_thread(count_gpus, options.device)
    placed = placements(options.num_workers, gpus, os.environ)
    await _start_workers(
        supervisor, [spec.with_env(env) for spec, env in zip(specs, placed, strict=True)], options.model, report
    )
    workers = tuple(connectable(one.calls) for one in chosen.workers)
    admins = tuple(one.admin for one in chosen.workers)
    metrics = tuple(one.metrics for one in chosen.workers)
    return Cluster(cache, workers, names, chosen.cache.metrics, chosen.cache.admin, admins, metrics, tier)


async def _start_workers(
    supervisor: Supervisor, specs: list[ChildSpec], model: str, report: Callable[[str], None]
) -> None:
    """Starts workers side by side; reports which one serves, and every few seconds what the others last wrote."""
    size = weights_bytes(model)
    what = f"the model ({size / 1e9:.1f} GB)" if size >= 1e8 else "the model"
    report(f"starting {len(specs)} worker{'s' * (len(specs) > 1)} and loading {what}")
    start = time.monotonic()

    async def one(spec: ChildSpec) -> Child:
        child = await supervisor.start(spec, ready_timeout_s=start_limit_s(model))
        report(f"{spec.name} serves after {time.monotonic() - start:.0f} s")
        return child

    async def tell() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            report(f"still loading, {time.monotonic() - start:.0f} s; {_last_words(supervisor, specs)}")

    telling = asyncio.create_task(tell())
    try:
        await _all_or_none(one(spec) for spec in specs)
    finally:
        telling.cancel()


def _last_words(supervisor: Supervisor, specs: list[ChildSpec]) -> str:
    """Returns the last line of a log: a download writes its progress there, between carriage returns."""
    child = supervisor.children[specs[0].name]
    lines = [line for line in child.log_tail(1).replace("\r", "\n").splitlines() if not line.startswith("{")]
    return lines[-1].strip()[:100] if lines and lines[-1].strip() else f"the log is {child.log_path}"


async def start_worker(
    supervisor: Supervisor, cluster: Cluster, options: ClusterOptions, name: str, env: Mapping[str, str]
) -> str:
    """Starts one more worker, with settings of its own, on a CPU or the first GPU. Returns its address."""
    listens = Listens(f"{LOOPBACK}:{free_port()}", "", "")
    gpus = await asyncio.to_thread(count_gpus, options.device)
    placement = placements(1, gpus, os.environ)[0]
    spec = _worker_child(name, listens, cluster.cache, cluster.tier, options, {**placement, **env})
    await supervisor.start(spec, ready_timeout_s=start_limit_s(options.model))
    return listens.calls


async def _all_or_none(starts: Iterable[Coroutine[Any, Any, Child]]) -> None:
    """Runs starts side by side; the first failure cancels the others and is raised: nothing starts any more after
    it."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _cache_child(listens: Listens, tier: HostTier, options: ClusterOptions) -> ChildSpec:
    env = {
        "STEMCACHE_CACHE_DRAIN_TIMEOUT_S": str(DRAIN_TIMEOUT_S),
        **_variables("STEMCACHE_CACHE_", options.environ),
        "STEMCACHE_CACHE_LISTEN": listens.calls,
        "STEMCACHE_CACHE_ADMIN_LISTEN": listens.admin,
        "STEMCACHE_CACHE_METRICS_LISTEN": listens.metrics,
        "STEMCACHE_CACHE_REDIS_URL": tier.redis_url,
        "STEMCACHE_CACHE_POLICY": options.policy,
        "STEMCACHE_CACHE_HOST_QUOTA_MB": str(options.host_mb),
        **options.cache_env,
    }
    address = connectable(listens.calls)
    return ChildSpec("cache", (sys.executable, "-m", "cache_service"), lambda: wait_serving(address), env)


def _worker_child(
    name: str, listens: Listens, cache: str, tier: HostTier, options: ClusterOptions, more: Mapping[str, str]
) -> ChildSpec:
    for variable in DECIDED_HERE:
        if variable in options.environ:
            raise CannotStart(f"{variable}: `stemcache up` names its workers and their cache service itself; unset it")
    threads = max(1, (os.cpu_count() or 1) // options.num_workers)
    env = {
        "STEMCACHE_WORKER_PAGE_TOKENS": str(options.page_tokens),
        "STEMCACHE_WORKER_THREADS": str(threads),
        "STEMCACHE_WORKER_DRAIN_TIMEOUT_S": str(DRAIN_TIMEOUT_S),
        "OMP_NUM_THREADS": str(threads),
        **_variables("STEMCACHE_WORKER_", options.environ),
        "STEMCACHE_WORKER_WORKER_ID": name,
        "STEMCACHE_WORKER_LISTEN": listens.calls,
        "STEMCACHE_WORKER_ADMIN_LISTEN": listens.admin,
        "STEMCACHE_WORKER_METRICS_LISTEN": listens.metrics,
        "STEMCACHE_WORKER_ADVERTISE": listens.advertise,
        "STEMCACHE_WORKER_CACHE": cache,
        "STEMCACHE_WORKER_MODEL": options.model,
        "STEMCACHE_WORKER_HOST_TIER": tier.kind,
        "STEMCACHE_WORKER_REDIS_URL": tier.redis_url,
        "STEMCACHE_WORKER_POOL_MB": str(options.pool_mb),
        "STEMCACHE_WORKER_DEVICE": options.device,
        **more,
    }
    trace = options.environ.get("STEMCACHE_WORKER_TRACE_PATH")
    if trace and options.num_workers > 1:
        env["STEMCACHE_WORKER_TRACE_PATH"] = f"{trace}.{name}"
    address = connectable(listens.calls)
    return ChildSpec(name, (sys.executable, "-m", "worker_service"), lambda: wait_serving(address), env)


def _variables(prefix: str, environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(prefix)}
