"""The real services as child processes on loopback: started, killed and restarted at will."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests import fork_server

START_SECONDS = 120.0
STOP_SECONDS = 60.0


def _clean_environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("STEMCACHE_")}
    # Two workers and the tests share few cores; more threads than that only wait for each other.
    return {**kept, "OMP_NUM_THREADS": "1"}


@dataclass
class ServiceProcess:
    """`python -m module` with settings; `start` waits for the line that says where it listens."""

    module: str
    prefix: str
    settings: dict[str, object]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    announced: dict[str, str] = field(default_factory=dict)
    _process: fork_server.Process | None = None

    @property
    def address(self) -> str:
        return self.announced["address"]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start without waiting; `wait_ready` follows."""
        environment = _clean_environment()
        environment.update({f"{self.prefix}{key.upper()}": str(value) for key, value in self.settings.items()})
        environment.update(self.environment)
        with self.log.open("ab") as log:
            self._process = fork_server.start(self.module, environment=environment, stdout=subprocess.PIPE, stderr=log)

    def wait_ready(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=_pump, args=(self._process.stdout, lines), daemon=True).start()
        line = lines.get(timeout=START_SECONDS)
        assert line, f"{self.module} ended before it served:\n{self.logged()[-4000:]}"
        self.announced = json.loads(line)

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def kill(self) -> None:
        """As by kill -9."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """As a supervisor would; returns the exit code."""
        return self._end(signal.SIGTERM)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def wait(self, timeout_s: float) -> int:
        """The exit code of a process that ends by itself. It may be started again afterwards."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        self._end(signal.SIGKILL)
        return code

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def _end(self, number: int) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()


def _pump(stream: IO[bytes], lines: queue.Queue[bytes]) -> None:
    """The first line (empty when there is none); the rest is read so that the child never waits for a reader."""
    try:
        lines.put(stream.readline())
        while stream.readline():
            pass
    except ValueError:  # closed under our feet, as the child was ended
        pass


def cache_process(folder: Path, **settings: object) -> ServiceProcess:
    defaults: dict[str, object] = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "grace_ms": 2000}
    return ServiceProcess("cache_service", "STEMCACHE_CACHE_", {**defaults, **settings}, folder / "cache.log")


def worker_process(folder: Path, name: str, cache: str, **settings: object) -> ServiceProcess:
    defaults: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "admin_listen": "127.0.0.1:0",
        "worker_id": name,
        "cache": cache,
        "device": "cpu",
        "threads": 1,
        "pool_mb": 64,
    }
    return ServiceProcess("worker_service", "STEMCACHE_WORKER_", {**defaults, **settings}, folder / f"{name}.log")
