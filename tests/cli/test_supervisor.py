"""Real child processes under the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from cli.supervisor import ChildFailed, ChildSpec, Supervisor

TOUCH_AND_SLEEP = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"


def sleeper(name: str, marker: Path) -> ChildSpec:
    async def ready() -> None:
        while not marker.exists():
            await asyncio.sleep(0.01)

    return ChildSpec(name, (sys.executable, "-c", TOUCH_AND_SLEEP, str(marker)), ready)


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def gone(pid: int) -> None:
    while alive(pid):
        await asyncio.sleep(0.02)


async def test_leaving_the_context_ends_every_child(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as supervisor:
        pids = [(await supervisor.start(sleeper(f"c{i}", tmp_path / f"m{i}"))).pid for i in range(2)]
        assert all(pid is not None and alive(pid) for pid in pids)
    assert not any(pid is not None and alive(pid) for pid in pids)


async def test_a_killed_child_comes_back(tmp_path: Path) -> None:
    marker = tmp_path / "m"
    events: list[str] = []
    async with Supervisor(tmp_path, events.append) as supervisor:
        child = await supervisor.start(sleeper("c", marker))
        first = child.pid
        marker.unlink()
        child.kill()
        await asyncio.wait_for(child.spec.ready(), 20)
        assert child.restarts == 1
        assert child.pid not in (None, first)
        assert any("ended with code -9" in event for event in events)


async def test_a_child_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    spec = ChildSpec("broken", (sys.executable, "-c", "raise SystemExit('no such model')"), never)
    async with Supervisor(tmp_path) as supervisor:
        with pytest.raises(ChildFailed, match=r"broken ended with code 1(.|\n)*no such model"):
            await supervisor.start(spec)


async def test_a_child_that_never_serves_is_reported(tmp_path: Path) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    spec = ChildSpec("mute", (sys.executable, "-c", "import time; time.sleep(60)"), never)
    async with Supervisor(tmp_path) as supervisor:
        with pytest.raises(ChildFailed, match="mute not ready"):
            await supervisor.start(spec, ready_timeout_s=0.5)
        pid = supervisor.children["mute"].pid
    assert pid is not None
    assert not alive(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux only")
async def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, pathlib, sys
from cli.supervisor import ChildSpec, Supervisor
async def main():
    marker = pathlib.Path({str(tmp_path / "m")!r})
    async def ready():
        while not marker.exists():
            await asyncio.sleep(0.01)
    spec = ChildSpec("c", (sys.executable, "-c", {TOUCH_AND_SLEEP!r}, str(marker)), ready)
    async with Supervisor(pathlib.Path({str(tmp_path)!r})) as supervisor:
        print((await supervisor.start(spec)).pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await asyncio.wait_for(gone(child), 10)
