"""A grpc.aio server with our limits, interceptor, health and reflection, and an orderly end.

Takes servicers, each with the function that registers it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from rpc.address import HostPort, parse_address
from rpc.health import NOT_SERVING, SERVING, Health
from rpc.health import SERVICE_NAME as HEALTH_NAME
from rpc.interceptor import CallInterceptor, Middleware
from rpc.limit import CallLimit
from rpc.options import ServerLimits, server_options
from rpc.reflection import add_reflection

# Calls that gRPC keeps for each one that is being served: ended ones, whose peer has not read everything yet.
UNREAD_FACTOR = 4

_log = logging.getLogger("rpc.server")


class Service(NamedTuple):
    """A servicer, the generated function that registers it, and its full name."""

    name: str
    add_to_server: Callable[[Any, Any], None]
    servicer: object


class CannotListen(Exception):
    """The address is in use, or not this machine's."""


class RpcServer:
    """Listens after `start`; `stop` says NOT_SERVING, lets calls finish, then closes."""

    def __init__(self, services: Sequence[Service], middleware: Sequence[Middleware], limits: ServerLimits) -> None:
        self.health = Health(service.name for service in services)
        self._server = grpc.aio.server(
            # Innermost, so that a refusal is counted and logged like any other.
            interceptors=(CallInterceptor([*middleware, CallLimit(limits.max_concurrent_calls)]),),
            options=server_options(limits),
            maximum_concurrent_rpcs=limits.max_concurrent_calls * UNREAD_FACTOR,
        )
        for service in services:
            service.add_to_server(service.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        add_reflection([*(service.name for service in services), HEALTH_NAME], self._server)

    async def start(self, address: str) -> HostPort:
        """Binds, serves, and returns the address with the real port."""
        wanted = parse_address(address)
        try:
            port = self._server.add_insecure_port(str(wanted))
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {wanted}: {error}") from error
        await self._server.start()
        await self.health.set_all(SERVING)
        return HostPort(wanted.host, port)

    async def stop(self, grace_s: float, before_close: Callable[[], Awaitable[None]] | None = None) -> None:
        """Stops serving. `before_close` ends long-lived streams in order; calls that are left after `grace_s` are cut
        off."""
        await self.health.set_all(NOT_SERVING)
        if before_close is not None:
            try:
                async with asyncio.timeout(grace_s):
                    await before_close()
            except TimeoutError:
                _log.warning("streams did not end within the grace period")
        await self.health.end_watches()
        await self._server.stop(grace_s)


@asynccontextmanager
async def listening(server: RpcServer, address: str, grace_s: float) -> AsyncIterator[HostPort | None]:
    """Serves at `address` while inside; yields the address with its real port. An empty one starts nothing."""
    if not address:
        yield None
        return
    bound = await server.start(address)
    try:
        yield bound
    finally:
        await server.stop(grace_s)
