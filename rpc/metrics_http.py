"""Serves Prometheus metrics over HTTP on a port of its own.

It runs on the event loop and not in a thread, so that collectors may read what the loop owns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from rpc.address import HostPort, parse_address

READ_TIMEOUT_S = 5.0
MAX_HEAD_BYTES = 8 * 1024
MAX_CONNECTIONS = 32

_log = logging.getLogger("rpc.metrics_http")


class MetricsServer:
    """Serves GET /metrics, one request per connection."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._num_connections = 0

    async def start(self, address: str) -> HostPort:
        wanted = parse_address(address)
        self._server = await asyncio.start_server(
            self._serve, wanted.host, wanted.port, limit=MAX_HEAD_BYTES, reuse_port=False
        )
        return HostPort(wanted.host, self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _log.debug("a metrics client was too slow, too long or gone")
        finally:
            self._num_connections -= 1
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.split(b"\r\n", 1)[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != b"/metrics":
            return _response(b"404 Not Found", "text/plain", b"only /metrics is here\n")
        if method != b"GET":
            return _response(b"405 Method Not Allowed", "text/plain", b"only GET is answered\n")
        return _response(b"200 OK", CONTENT_TYPE_LATEST, generate_latest(self._registry))


@asynccontextmanager
async def serving_metrics(registry: CollectorRegistry, address: str) -> AsyncIterator[HostPort | None]:
    """Serves while the context is open; yields the address with its real port, None for an empty one."""
    if not address:
        yield None
        return
    server = MetricsServer(registry)
    bound = await server.start(address)
    try:
        yield bound
    finally:
        await server.stop()


def _response(status: bytes, content_type: str, body: bytes) -> bytes:
    return (
        b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        % (status, content_type.encode("ascii"), len(body))
        + body
    )
