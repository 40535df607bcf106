"""Addresses as `host:port`.

Names are not resolved here.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_PORT = 65_535


class HostPort(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> HostPort:
    """Parses `host:port` or `[v6]:port`; port 0 asks for any free one. Raises ValueError."""
    host, separator, port = text.rpartition(":")
    if not separator or not host:
        raise ValueError(f"{text!r} is not host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write IPv6 addresses as [address]:port")
    if not (port.isascii() and port.isdigit() and int(port) <= MAX_PORT):
        raise ValueError(f"{text!r}: the port must be 0..{MAX_PORT}")
    return HostPort(host, int(port))
