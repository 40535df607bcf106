"""`stemcache doctor`: looks at what usually goes wrong, says what it saw, and what to do about it.

Changes nothing.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import typer

from cli.app import CacheOption, JsonOption, app, check_address, run
from cli.client import StemcacheClient
from cli.output import Output, plain, table
from cli.redis_server import find_redis_binary
from cli.run_file import read_record, state_dir

PACKAGES = ("grpcio", "protobuf", "redis", "hiredis", "torch", "triton", "safetensors", "tokenizers")
MIN_FREE_BYTES = 2 << 30


class Finding(NamedTuple):
    """`ok` is False for what keeps Stemcache from working and None for what merely limits it."""

    what: str
    ok: bool | None
    seen: str
    advice: str = ""


@app.command()
def doctor(cache: CacheOption = "", json_: JsonOption = False) -> None:
    """Check this machine and the running services; exit code 1 when something is broken."""
    output = Output(as_json=json_)
    if cache:
        check_address("--cache", cache)
    with output.working("looking"):
        findings = [check() for check in CHECKS] + run(_services(cache))
    marks = {True: "[green]ok[/green]", None: "[yellow]note[/yellow]", False: "[red]broken[/red]"}
    rows = [(marks[f.ok], f.what, plain(f.seen + (f"; {f.advice}" if f.advice else ""))) for f in findings]
    output.show(table("", ("", "what", "seen"), rows, left=3))
    healthy = all(finding.ok is not False for finding in findings)
    output.emit({"healthy": healthy, "findings": [finding._asdict() for finding in findings]})
    if not healthy:
        raise typer.Exit(1)


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    return Finding("Python", good, platform.python_version(), "" if good else "3.11 or newer is needed")


def _packages() -> Finding:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    advice = f"not installed: {', '.join(missing)}; run `make setup`" if missing else ""
    return Finding("packages", not missing, ", ".join(found), advice)


def _accelerator() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("accelerator", None, "PyTorch is not installed", "workers need it; the cache service does not")
    # In a process of its own: importing PyTorch here would cost seconds and may start a driver.
    code = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    try:
        seen = subprocess.run(  # noqa: S603 - our own interpreter and text
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
    except (subprocess.SubprocessError, OSError) as error:
        return Finding("accelerator", False, f"PyTorch does not start: {type(error).__name__}", "reinstall it")
    return (
        Finding("accelerator", True, seen)
        if seen
        else Finding("accelerator", None, f"none; {os.cpu_count()} CPU cores", "workers run on the CPU")
    )


def _redis() -> Finding:
    binary = find_redis_binary()
    if binary is None:
        advice = "install Redis, or workers will spill to their own memory and share nothing"
        return Finding("redis-server", None, "none found", advice)
    try:
        asked = subprocess.run(  # noqa: S603 - the binary that `stemcache up` would run
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        return Finding("redis-server", False, binary, f"it does not run: {type(error).__name__}")
    number = next((word[2:] for word in asked.stdout.split() if word.startswith("v=")), "of unknown version")
    return Finding("redis-server", True, f"{number}, {binary}")


def _disk() -> Finding:
    free = shutil.disk_usage(state_dir() if state_dir().exists() else ".").free
    good = free >= MIN_FREE_BYTES
    return Finding("free disk", good, f"{free / 2**30:.1f} GiB", "" if good else "logs and models need room")


CHECKS: tuple[Callable[[], Finding], ...] = (_python, _packages, _accelerator, _redis, _disk)


async def _services(cache: str) -> list[Finding]:
    record = read_record()
    address = cache or (record.cache if record else "")
    if not address:
        return [Finding("services", None, "none running here", "start them with `stemcache up`")]
    workers = record.workers if record and not cache else ()
    async with StemcacheClient(address, workers) as client:
        findings = []
        for name, one in [("cache service", address), *(("worker", worker) for worker in workers)]:
            good = await client.is_serving(one)
            findings.append(
                Finding(name, good, one, "" if good else f"not serving; see the logs in {state_dir() / 'logs'}")
            )
        if findings[0].ok:
            findings.append(await _host_tier(client))
    return findings


async def _host_tier(client: StemcacheClient) -> Finding:
    stats = await client.stats()
    gone = [w.worker_id for w in stats.workers if not w.connected]
    if stats.host_tier.breaker_open:
        return Finding("host tier", False, "the breaker is open", "Redis does not answer; serving goes on without it")
    return Finding(
        "sessions", not gone, f"{len(stats.workers) - len(gone)} connected", f"gone: {', '.join(gone)}" if gone else ""
    )
