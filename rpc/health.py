"""The standard health service: which services of this server take calls now.

The server's owner sets the status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.interceptor import Context

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """One status for each service name; the empty name means the whole server."""

    def __init__(self, services: Iterable[str]) -> None:
        self._status = dict.fromkeys(("", *services), NOT_SERVING)
        self._changed = asyncio.Condition()
        self._ended = False

    async def set_all(self, status: int) -> None:
        async with self._changed:
            self._status = dict.fromkeys(self._status, status)
            self._changed.notify_all()

    async def end_watches(self) -> None:
        """Ends every Watch stream, or each would hold up the server's end."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "service: unknown to this server")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        told: int | None = None
        while True:
            status = self._status.get(request.service, SERVICE_UNKNOWN)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
                continue
            if self._ended:
                return
            async with self._changed:
                # Asked again under the lock, or a change between the yield and here would be slept through.
                if self._status.get(request.service, SERVICE_UNKNOWN) == told and not self._ended:
                    await self._changed.wait()
