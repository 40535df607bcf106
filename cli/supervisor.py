"""Starts child processes, waits until they serve, restarts what died, and ends them all, last started first.

A ChildSpec says how to start a child and how to tell that it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

RESTART_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_AFTER_S = 30.0
TERM_GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start one child. `ready` returns once it serves, or raises ChildFailed's reason."""

    name: str
    argv: tuple[str, ...]
    ready: Callable[[], Awaitable[None]]
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""

    def with_env(self, env: Mapping[str, str]) -> ChildSpec:
        """Returns the same with further variables."""
        return replace(self, env={**self.env, **env})


class ChildFailed(Exception):
    """A child ended or did not serve in time; the text names it and ends with its last log lines."""


class Child:
    """One supervised process. `restarts` counts how often it came back."""

    def __init__(self, spec: ChildSpec, log_dir: Path) -> None:
        self.spec = spec
        self.log_path = log_dir / f"{spec.name}.log"
        self.restarts = 0
        self.process: asyncio.subprocess.Process | None = None
        self.started_s = 0.0

    @property
    def pid(self) -> int | None:
        return None if self.process is None or self.process.returncode is not None else self.process.pid

    async def start(self) -> None:
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "cli.die_with_parent",
                str(os.getpid()),
                *self.spec.argv,
                env={**os.environ, **self.spec.env},
                stdin=asyncio.subprocess.PIPE if self.spec.stdin else asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A terminal's Ctrl-C reaches the supervisor alone, which then ends the children in order.
                start_new_session=True,
            )
        self.started_s = time.monotonic()
        if self.spec.stdin and self.process.stdin is not None:
            self.process.stdin.write(self.spec.stdin)
            self.process.stdin.write_eof()

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits until the child serves. Raises ChildFailed when it ends first or takes too long."""
        assert self.process is not None
        ended = asyncio.ensure_future(self.process.wait())
        ready = asyncio.ensure_future(self.spec.ready())
        try:
            done, _ = await asyncio.wait({ended, ready}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ready in done:
                ready.result()
                return
            reason = (
                f"ended with code {self.process.returncode}" if ended in done else f"not ready after {timeout_s:.0f} s"
            )
            raise ChildFailed(f"{self.spec.name} {reason}{self._why()}")
        finally:
            for task in (ended, ready):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    def _why(self) -> str:
        """Returns one line if the child's log ends with an error line, as a service's does; else the end of its log."""
        last = self.log_tail(1)
        if ": error: " in last[:40]:
            return f": {last.partition(': error: ')[2]} (log: {self.log_path})"
        return f"; the end of {self.log_path}:\n{self.log_tail()}"

    def log_tail(self, num_lines: int = 15) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])
        return ""

    async def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL when that was not enough."""
        if self.process is None or self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), TERM_GRACE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    def kill(self) -> None:
        """Sends SIGKILL at once, which is like a crash."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()


class Supervisor:
    """Owns the children. Use as an async context: leaving it ends every child, also after an error."""

    def __init__(self, log_dir: Path, on_event: Callable[[str], None] = lambda _: None) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._log_dir = log_dir
        self._on_event = on_event
        self.children: dict[str, Child] = {}
        self._watchers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, spec: ChildSpec, *, ready_timeout_s: float = 60.0) -> Child:
        """Starts a child, waits until it serves, and starts it again whenever it ends."""
        child = Child(spec, self._log_dir)
        child.log_path.unlink(missing_ok=True)
        self.children[spec.name] = child
        await child.start()
        await child.wait_ready(ready_timeout_s)
        self._watchers.append(asyncio.create_task(self._watch(child), name=f"watch {spec.name}"))
        return child

    async def _watch(self, child: Child) -> None:
        attempt = 0
        while True:
            assert child.process is not None
            code = await child.process.wait()
            if time.monotonic() - child.started_s > STABLE_AFTER_S:
                attempt = 0
            delay = RESTART_DELAYS_S[min(attempt, len(RESTART_DELAYS_S) - 1)]
            attempt += 1
            self._on_event(f"{child.spec.name} ended with code {code}; starting it again in {delay:g} s")
            await asyncio.sleep(delay)
            child.restarts += 1
            try:
                await child.start()
            except OSError as error:  # out of processes or disk, say; the delays go on
                self._on_event(f"{child.spec.name} could not be started: {error}")

    async def stop(self) -> None:
        """Ends every child, last started first. Idempotent."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers.clear()
        for child in reversed(self.children.values()):
            await child.stop()
