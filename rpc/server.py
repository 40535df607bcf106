"""A grpc.aio server with our limits, interceptor, health and reflection, and an orderly end.

Knows no service; it is given servicers with the function that registers each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rpc.address import HostPort, parse_address
from rpc.health import NOT_SERVING, SERVING, Health
from rpc.health import SERVICE_NAME as HEALTH_NAME
from rpc.interceptor import Around, CallInterceptor
from rpc.options import ServerLimits, server_options

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

    def __init__(
        self, services: Sequence[Service], arounds: Sequence[Around], limits: ServerLimits | None = None
    ) -> None:
        limits = limits or ServerLimits()
        self.health = Health(service.name for service in services)
        self._server = grpc.aio.server(
            interceptors=(CallInterceptor(arounds),),
            options=server_options(limits),
            maximum_concurrent_rpcs=limits.max_concurrent_calls,
        )
        for service in services:
            service.add_to_server(service.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        names = [service.name for service in services]
        reflection.enable_server_reflection([*names, HEALTH_NAME, reflection.SERVICE_NAME], self._server)

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
        """`before_close` ends long-lived streams in their own words; what is left after `grace_s` is cut."""
        await self.health.set_all(NOT_SERVING)
        if before_close is not None:
            try:
                async with asyncio.timeout(grace_s):
                    await before_close()
            except TimeoutError:
                _log.warning("streams did not end within the grace period")
        await self.health.end_watches()
        await self._server.stop(grace_s)
