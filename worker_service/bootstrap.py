"""Builds a worker from its settings, runs it, and takes it down in order. The only constructor of things."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import xxhash
from prometheus_client import CollectorRegistry

from protos.v1 import worker_pb2, worker_pb2_grpc
from rpc.address import HostPort
from rpc.client import open_channel
from rpc.collector import SHORT_LIVED, seldom_collected
from rpc.deadline import deadlines
from rpc.errors import errors_to_status
from rpc.health import NOT_SERVING
from rpc.interceptor import Middleware
from rpc.lifecycle import stop_event
from rpc.logs import announcement
from rpc.metrics import RpcMetrics
from rpc.metrics_http import serving_metrics
from rpc.options import ServerLimits
from rpc.request_id import with_request_id
from rpc.server import RpcServer, Service, listening
from rpc.settings import describe
from session.limits import MAX_MESSAGE_BYTES
from session.messages import Ack, Hello
from session.protocol import WORKER_CAPABILITIES
from session.words import WorkerId
from tier_client.redis_tier import RedisTier, RedisTierConfig
from worker_service.cache_client import CacheClient, ClientLimits
from worker_service.compute import Compute
from worker_service.config import WorkerConfig
from worker_service.core.ports import HostTier
from worker_service.core.scheduler import Scheduler
from worker_service.core.scheduler_config import SchedulerConfig
from worker_service.engine import Engine
from worker_service.fingerprint import fingerprint
from worker_service.health import follow_health
from worker_service.host_tier.memory import MemoryTier
from worker_service.host_tier.metered import Measure, MeteredTier
from worker_service.launch.device_runner import DeviceRunner
from worker_service.launch.launcher import Launcher
from worker_service.metrics import Load, WorkerMetrics
from worker_service.serving import codec
from worker_service.serving.servicer import CODES, ModelWorkerServicer, WorkerAdminServicer
from worker_service.tasks import watched
from worker_service.tier_watch import TierWatch
from worker_service.transfer.moved_pages import PageFrame
from worker_service.transfer.page_mover import MoverLimits, PageMover

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["ModelWorker"].full_name
ADMIN_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerAdmin"].full_name
CALL_TIMEOUT_S = 30.0
STOP_GRACE_S = 2.0

_log = logging.getLogger("worker_service")


class WorkerService(NamedTuple):
    """What runs, and where it listens."""

    engine: Engine
    running: asyncio.Task[None]
    worker_id: str
    incarnation: str
    drained: asyncio.Event
    address: HostPort
    admin_address: HostPort | None
    metrics_address: HostPort | None


def scheduler_config(config: WorkerConfig, compute: Compute) -> SchedulerConfig:
    model = compute.loaded.spec
    return SchedulerConfig(
        page_tokens=compute.pools.page_tokens,
        groups=compute.pools.specs(),
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        mixed_prefill_tokens=config.mixed_prefill_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        chunked_prefill=config.chunked_prefill,
        reserve_pages=config.reserve_pages,
        decode_ahead_tokens=config.decode_ahead_tokens,
        max_decode_ahead_tokens=config.max_decode_ahead_tokens,
        async_scheduling=config.async_scheduling,
    )


def make_tier(config: WorkerConfig, metrics: WorkerMetrics) -> HostTier | None:
    if config.host_tier == "none":
        return None
    if config.host_tier == "memory":
        tier: HostTier = MemoryTier(config.memory_tier_mb << 20)
    else:
        settings = RedisTierConfig(config.mover_threads + 1, config.host_timeout_s, config.host_ttl_s * 1000)
        tier = RedisTier(config.redis_url, settings)

    def record(measure: Measure) -> None:
        metrics.host_tier(measure.operation, measure.num_bytes, failed=measure.failed)

    return MeteredTier(tier, record)


class _Worker:
    """The worker's parts, connected; the functions below start and stop them."""

    def __init__(self, config: WorkerConfig, compute: Compute) -> None:
        self.config = config
        self.compute = compute
        self.worker_id = config.worker_id or f"worker-{secrets.token_hex(4)}"
        self.incarnation = secrets.token_hex(16)
        self.registry = CollectorRegistry()
        self.metrics = WorkerMetrics(self.registry)
        self.tier = make_tier(config, self.metrics)
        self.tier_watch = TierWatch(self.tier)
        self.address = HostPort("", 0)
        self.engine = Engine(
            Scheduler(scheduler_config(config, compute)),
            self._cache_client(),
            Launcher(DeviceRunner(compute.runner, compute.device), config.launch_timeout_s),
            self._mover,
            self.metrics,
            config.detach_after_ms / 1000,
        )
        self.metrics.watch(self._load)
        self.drained = asyncio.Event()
        self.server, self.admin = self._servers()

    def _cache_client(self) -> CacheClient:
        hello = Hello(
            WorkerId(self.worker_id),
            "",
            self.incarnation,
            fingerprint(self.compute),
            self.compute.pools.page_tokens,
            self.compute.pools.specs(),
            model=self.compute.loaded.digest.hex(),
            capabilities=WORKER_CAPABILITIES,
            started_ns=time.time_ns(),
        )
        limits = ClientLimits(reply_timeout_s=self.config.reply_timeout_s)
        return CacheClient(
            lambda: open_channel(self.config.cache, MAX_MESSAGE_BYTES), lambda: self._at_present(hello), limits
        )

    def _at_present(self, hello: Hello) -> Hello:
        """Returns the Hello with what may have changed since the start: where this worker serves, and its host tier."""
        endpoint, tier = self.config.advertise or str(self.address), self.tier_watch.facts
        return hello._replace(endpoint=endpoint, host_tier=tier.kind, host_tier_id=tier.identity)

    def _mover(self, on_ack: Callable[[Ack], None]) -> PageMover:
        dtypes = tuple(layout.dtype_code for layout in self.compute.pools.layouts)
        frame = PageFrame(dtypes, lambda data: xxhash.xxh3_128_digest(data))
        config = self.config
        limits = MoverLimits(config.mover_threads, config.max_queued_transfers, self.compute.part_bytes)
        self.mover = PageMover(self.compute.pools, self.tier, frame, on_ack, limits)
        return self.mover

    def _load(self) -> Load:
        scheduler = self.engine.scheduler
        return Load(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            held=scheduler.num_held,
            connected=self.engine.epoch is not None,
            transfers=self.mover.num_running,
        )

    def _servers(self) -> tuple[RpcServer, RpcServer]:
        """The public one and the admin one."""
        config = self.config
        self.servicer = servicer = ModelWorkerServicer(
            self.engine, self.compute.loaded.tokenizer, self._description(), prefix_caching=config.prefix_caching
        )
        service = Service(SERVICE_NAME, worker_pb2_grpc.add_ModelWorkerServicer_to_server, servicer)
        admin_servicer = WorkerAdminServicer(self.engine, config.drain_timeout_s, self.drained)
        admin = Service(ADMIN_NAME, worker_pb2_grpc.add_WorkerAdminServicer_to_server, admin_servicer)
        # A Drain may name its own time, so it is bounded by the caller's deadline and this.
        calls = deadlines(
            CALL_TIMEOUT_S,
            dict.fromkeys((f"/{SERVICE_NAME}/Generate", f"/{ADMIN_NAME}/Drain"), config.request_timeout_s),
        )
        middleware: list[Middleware] = [RpcMetrics(self.registry), with_request_id, errors_to_status(CODES), calls]
        limits = ServerLimits(MAX_MESSAGE_BYTES)
        return RpcServer([service], middleware, limits), RpcServer([admin], middleware, limits)

    def _description(self) -> codec.WorkerDescription:
        compute, spec = self.compute, self.compute.loaded.spec
        return codec.WorkerDescription(
            self.worker_id,
            self.incarnation,
            spec.architecture,
            compute.loaded.digest.hex(),
            compute.pools.page_tokens,
            codec.VocabLimits(spec.vocab_size, spec.max_model_len),
            str(compute.device),
            str(compute.loaded.model.dtype).removeprefix("torch."),
            compute.pools.specs(),
            describe(self.config),
        )


@asynccontextmanager
async def running(config: WorkerConfig, compute: Compute) -> AsyncIterator[WorkerService]:
    """The worker, serving once it has a session; on exit it drains, says Goodbye, and closes."""
    worker = _Worker(config, compute)
    async with AsyncExitStack() as stack:
        metrics = await stack.enter_async_context(serving_metrics(worker.registry, config.metrics_listen))
        await worker.tier_watch.refresh()
        admin = await stack.enter_async_context(listening(worker.admin, config.admin_listen, STOP_GRACE_S))
        worker.address = await worker.server.start(config.listen)
        await worker.server.health.set_all(NOT_SERVING)
        task = await stack.enter_async_context(_engine(worker))
        names = (worker.worker_id, worker.incarnation)
        yield WorkerService(worker.engine, task, *names, worker.drained, worker.address, admin, metrics)


@asynccontextmanager
async def _engine(worker: _Worker) -> AsyncIterator[asyncio.Task[None]]:
    engine = worker.engine
    task = asyncio.create_task(engine.run(), name="engine")
    watch = watched(worker.tier_watch.run(engine.reconnect_soon), "tier-watch", engine.fail)
    health = watched(follow_health(engine, worker.server.health), "health", engine.fail)
    try:
        yield task
    finally:
        watch.cancel()
        health.cancel()
        await asyncio.gather(watch, health, return_exceptions=True)
        await worker.server.health.set_all(NOT_SERVING)
        if not task.done():
            await engine.drain(worker.config.drain_timeout_s)
        await worker.server.stop(STOP_GRACE_S)
        worker.servicer.close()
        engine.stop()
        await asyncio.gather(task, return_exceptions=True)
        if worker.config.trace_path:
            engine.trace.write(Path(worker.config.trace_path))


async def serve(config: WorkerConfig, compute: Compute, announce: Callable[[str], None]) -> None:
    """Runs until SIGTERM or SIGINT, a Drain, or the engine's end. `announce` gets one JSON line with the addresses."""
    stop = asyncio.ensure_future(stop_event().wait())
    async with running(config, compute) as service:
        _log.info("serving", extra={"address": str(service.address), "config": describe(config)})
        drained = asyncio.ensure_future(service.drained.wait())
        with seldom_collected(SHORT_LIVED):
            announce(_announcement(service))
            await asyncio.wait({stop, drained, service.running}, return_when=asyncio.FIRST_COMPLETED)
        _log.info("stopping", extra={"reason": "drained" if drained.done() else "signal, or the engine ended"})
    stop.cancel()
    drained.cancel()
    service.running.result()
    _log.info("stopped")


def _announcement(service: WorkerService) -> str:
    return announcement(
        "worker_service",
        address=service.address,
        admin=service.admin_address,
        metrics=service.metrics_address,
        worker_id=service.worker_id,
        incarnation=service.incarnation,
    )
