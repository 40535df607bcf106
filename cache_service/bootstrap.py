"""Builds the cache service from its settings, runs it, and takes it down in order. The only constructor of things.

Only `__main__` and the command line import it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from cache_service import status
from cache_service.compiled import CORE_FORM
from cache_service.config import CacheConfig
from cache_service.core.base.types import FetchPolicy, SpillPolicy
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from cache_service.effect_dispatcher import EffectDispatcher
from cache_service.host_keys import HostKeysConfig, RedisHostKeys, open_client
from cache_service.host_tier_servicer import HostTierServicer
from cache_service.metrics import ManagerCollector, counter_of, gauge_of, step_observer
from cache_service.reaper import Reaper, monotonic_ms
from cache_service.servicer import CacheAdminServicer, PrefixCacheServicer
from cache_service.watchers import Watchers, WatchLimits
from cache_service.worker_streams import Sessions, StreamLimits
from protos.v1 import cache_pb2, cache_pb2_grpc, host_tier_pb2, host_tier_pb2_grpc
from rpc.address import HostPort
from rpc.collector import LONG_LIVED, seldom_collected
from rpc.deadline import deadlines
from rpc.errors import errors_to_status
from rpc.interceptor import Middleware
from rpc.lifecycle import stop_event
from rpc.logs import announcement
from rpc.metrics import RpcMetrics
from rpc.metrics_http import serving_metrics
from rpc.options import ServerLimits
from rpc.request_id import with_request_id
from rpc.server import RpcServer, Service, listening
from rpc.settings import describe

SERVICE_NAME = cache_pb2.DESCRIPTOR.services_by_name["PrefixCache"].full_name
ADMIN_NAME = cache_pb2.DESCRIPTOR.services_by_name["CacheAdmin"].full_name
HOST_TIER = host_tier_pb2.DESCRIPTOR.services_by_name["HostTier"]
# These get no timer: each is one call of a method of the manager, which never waits.
NEVER_WAIT = (
    f"/{SERVICE_NAME}/Match",
    f"/{SERVICE_NAME}/Stats",
    *(f"/{HOST_TIER.full_name}/{method.name}" for method in HOST_TIER.methods),
)
# Time that admin calls get to end.
ADMIN_GRACE_S = 1.0

# What a sealed message adds to its body, with room to spare.
ENVELOPE_BYTES = 64

_log = logging.getLogger("cache_service")


class CacheService(NamedTuple):
    """What runs, and where it listens."""

    epoch: str
    manager: CacheManager
    sessions: Sessions
    watchers: Watchers
    registry: CollectorRegistry
    address: HostPort
    admin_address: HostPort | None
    metrics_address: HostPort | None


def manager_config(config: CacheConfig) -> ManagerConfig:
    return ManagerConfig(
        policy=config.policy,
        spill=SpillPolicy(config.spill),
        fetch=FetchPolicy(config.fetch),
        host_quota_bytes=config.host_quota_mb << 20,
        host_ttl_ms=config.host_ttl_s * 1000,
        host_renew_ms=config.host_ttl_s * 250,
        scans_host_tiers=bool(config.redis_url),
        host_lease_ms=config.host_lease_s * 1000,
        max_attachments=config.max_attachments,
        attachment_idle_ms=config.attachment_idle_s * 1000,
        grace_ms=config.grace_ms,
        max_workers=config.max_workers,
        max_live_sequences=config.max_live_sequences,
        max_sequence_tokens=config.max_sequence_tokens,
        max_message_bytes=(config.max_message_mb << 20) - ENVELOPE_BYTES,
        max_adopt_pages=config.max_adopt_pages,
        max_kept_bytes=config.max_kept_mb << 20,
        max_open_tickets=config.max_open_tickets,
        transfer_pages=config.transfer_pages,
        ghost_factor=config.ghost_factor,
        write_back_low_water=config.write_back_low_water,
        max_pinned_share=config.max_pinned_share,
        max_spill_ms=config.max_spill_s * 1000,
        max_lease_bytes=config.max_lease_mb << 20,
        max_total_lease_bytes=config.max_total_lease_mb << 20,
        breaker_failures=config.breaker_failures,
        breaker_ms=config.breaker_ms,
    )


def watch_limits(config: CacheConfig) -> WatchLimits:
    return WatchLimits(
        max_watchers=config.max_watchers if config.watch else 0,
        max_queued=config.watch_queue,
        max_queued_bytes=config.watch_queue_mb << 20,
        write_timeout_s=config.write_timeout_s,
        max_present_states=config.max_present_states,
    )


def stream_limits(config: CacheConfig) -> StreamLimits:
    return StreamLimits(
        max_sessions=config.max_sessions,
        hello_timeout_s=config.hello_timeout_s,
        write_timeout_s=config.write_timeout_s,
    )


@asynccontextmanager
async def running(
    config: CacheConfig,
    clock: Callable[[], int] = monotonic_ms,
    make_manager: Callable[[ManagerConfig, str], CacheManager] = CacheManager,
) -> AsyncIterator[CacheService]:
    """The service, serving; on exit it says NOT_SERVING, ends its streams, lets calls finish, and closes."""
    registry = CollectorRegistry()
    epoch = secrets.token_hex(8)
    manager = make_manager(manager_config(config), epoch)
    registry.register(ManagerCollector(manager.stats))
    watchers = Watchers(epoch, watch_limits(config), manager.watch, manager.present_state)
    async with AsyncExitStack() as stack:
        host_keys = await stack.enter_async_context(_host_keys(config, manager))
        dispatcher = EffectDispatcher(manager, watchers, host_keys)
        sessions = Sessions(manager, dispatcher, clock, stream_limits(config), step_observer(registry))
        gauge_of(registry, "sessions", "Workers with a Session stream.", lambda: len(sessions))
        gauge_of(registry, "watchers", "Watch streams.", lambda: len(watchers))
        if host_keys is not None:
            keys = host_keys
            counter_of(registry, "host_keys_dropped", "Deletes and touches for want of room.", lambda: keys.num_dropped)
        await stack.enter_async_context(_ticking(Reaper(sessions, config.tick_ms / 1000)))
        metrics = await stack.enter_async_context(serving_metrics(registry, config.metrics_listen))
        admin, address = await stack.enter_async_context(_serving(config, sessions, watchers, registry))
        yield CacheService(epoch, manager, sessions, watchers, registry, address, admin, metrics)


@asynccontextmanager
async def _host_keys(config: CacheConfig, manager: CacheManager) -> AsyncIterator[RedisHostKeys | None]:
    if not config.redis_url:
        yield None
        return
    settings = HostKeysConfig(ttl_ms=config.host_ttl_s * 1000)
    host_keys = RedisHostKeys(open_client(config.redis_url, settings.timeout_s), manager, settings)
    host_keys.start()
    try:
        yield host_keys
    finally:
        await host_keys.close()


@asynccontextmanager
async def _serving(
    config: CacheConfig, sessions: Sessions, watchers: Watchers, registry: CollectorRegistry
) -> AsyncIterator[tuple[HostPort | None, HostPort]]:
    """The admin address and the public one. The admin listener is there first, and closes last."""
    middleware: list[Middleware] = [
        RpcMetrics(registry),
        with_request_id,
        errors_to_status(status.CODES),
        deadlines(config.call_timeout_s, dict.fromkeys(NEVER_WAIT)),
    ]
    limits = ServerLimits(max_message_bytes=config.max_message_mb << 20)
    admin_servicer = CacheAdminServicer(sessions, config.max_pin_ms)
    admin_service = Service(ADMIN_NAME, cache_pb2_grpc.add_CacheAdminServicer_to_server, admin_servicer)
    servicer = PrefixCacheServicer(sessions, watchers)
    services = [
        Service(SERVICE_NAME, cache_pb2_grpc.add_PrefixCacheServicer_to_server, servicer),
        Service(HOST_TIER.full_name, host_tier_pb2_grpc.add_HostTierServicer_to_server, HostTierServicer(sessions)),
    ]
    async with listening(RpcServer([admin_service], middleware, limits), config.admin_listen, ADMIN_GRACE_S) as admin:
        server = RpcServer(services, middleware, limits)
        address = await server.start(config.listen)
        try:
            yield admin, address
        finally:
            await server.stop(config.drain_timeout_s, lambda: _end_streams(sessions, watchers))


@asynccontextmanager
async def _ticking(reaper: Reaper) -> AsyncIterator[None]:
    task = asyncio.create_task(reaper.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _end_streams(sessions: Sessions, watchers: Watchers) -> None:
    watchers.close()
    await sessions.close()


async def serve(config: CacheConfig, announce: Callable[[str], None]) -> None:
    """Runs until SIGTERM or SIGINT. `announce` gets one JSON line with the bound addresses once calls are answered."""
    stop = stop_event()
    async with running(config) as service:
        _log.info("serving", extra={"address": str(service.address), "core": CORE_FORM, "config": describe(config)})
        with seldom_collected(LONG_LIVED):
            announce(_announcement(service))
            await stop.wait()
        _log.info("stopping")
    _log.info("stopped")


def _announcement(service: CacheService) -> str:
    return announcement(
        "cache_service",
        address=service.address,
        admin=service.admin_address,
        metrics=service.metrics_address,
        epoch=service.epoch,
    )
