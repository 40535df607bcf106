"""The `stemcache` command as a real process, and what /proc says about its children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests import fork_server

WAIT_S = 270.0


class Process(NamedTuple):
    """A process that stays itself: a pid alone may come back as somebody else's."""

    pid: int
    started: str

    def alive(self) -> bool:
        return _started(self.pid) == self.started

    def kill(self) -> None:
        """As by kill -9."""
        os.kill(self.pid, signal.SIGKILL)

    def is_a(self, marker: str) -> bool:
        """Whether its command line has this marker, or it is the worker of this name."""
        with contextlib.suppress(OSError):
            return marker in self.command_line() or self.environment().get("STEMCACHE_WORKER_WORKER_ID") == marker
        return False

    def command_line(self) -> str:
        return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")

    def environment(self) -> dict[str, str]:
        raw = Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="replace")
        return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)


def _started(pid: int) -> str:
    """Empty when the process is gone or has ended and only waits to be noticed."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def children(pid: int) -> set[Process]:
    with contextlib.suppress(OSError):
        pids = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return {Process(child, started) for child in pids if (started := _started(child))}
    return set()


def environment(state: Path, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("STEMCACHE_")}
    return {**kept, "STEMCACHE_STATE_DIR": str(state), "OMP_NUM_THREADS": "1", **more}


def stemcache(state: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return fork_server.run("cli", *arguments, environment=environment(state, **more), timeout=WAIT_S)


def ask(state: Path, *arguments: str, **more: str) -> dict[str, Any]:
    """A command with --json that must succeed, and its one object."""
    done = stemcache(state, *arguments, "--json", **more)
    assert done.returncode == 0, done.stderr
    return one_object(done.stdout)


def one_object(stdout: str) -> dict[str, Any]:
    assert stdout.count("\n") == 1 and stdout.endswith("\n"), stdout
    value = json.loads(stdout)
    assert isinstance(value, dict)
    return value


class Running:
    """A command under way: its output goes to files, its children are remembered whenever one looks."""

    def __init__(self, folder: Path, state: Path, *arguments: str, **more: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "stdout", folder / "stderr"
        self.seen: set[Process] = set()
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = fork_server.start(
                "cli", *arguments, environment=environment(state, **more), stdout=out, stderr=err
            )

    def look(self) -> set[Process]:
        now = children(self.process.pid)
        self.seen |= now
        return now

    def child(self, marker: str) -> Process:
        """The only child that is a `marker`."""
        found = [child for child in self.look() if child.is_a(marker)]
        assert len(found) == 1, (marker, found)
        return found[0]

    def wait_for_stdout(self, text: str) -> None:
        for _ in pauses(f"{text!r} on stdout"):
            self.look()
            if text in self.out.read_text():
                return
            assert self.process.poll() is None, self.err.read_text()

    def wait(self) -> int:
        """The exit code."""
        for _ in pauses("the end of the command"):
            self.look()
            if self.process.poll() is not None:
                return self.process.returncode
        raise AssertionError

    def interrupt(self) -> int:
        """As Ctrl-C; returns the exit code."""
        self.look()
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def end(self) -> None:
        """Whatever the test left; its children end with it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def pauses(what: str) -> Iterator[None]:
    """Try, sleep, try again; fails when the time is up."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        yield
        time.sleep(0.05)
    raise AssertionError(f"waited {WAIT_S:.0f} s for {what}")
