"""`python -m cache_service` as an operator meets it: its first line, its errors, its logs, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.v1 import cache_pb2, cache_pb2_grpc
from rpc.client import open_channel
from session.limits import MAX_MESSAGE_BYTES
from tests.cache_service.peer import PATIENCE_S, Peer
from tests.session.messages import acquire, tokens

COMMAND = (sys.executable, "-m", "cache_service")
ROOT = Path(__file__).parents[2]


def environment(**settings: str) -> Mapping[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("STEMCACHE_")}
    return kept | {f"STEMCACHE_CACHE_{key}": value for key, value in settings.items()}


class Running(NamedTuple):
    process: asyncio.subprocess.Process
    told: dict[str, str]
    channel: grpc.aio.Channel

    async def end(self) -> tuple[int, list[dict[str, Any]]]:
        """The exit code and the log, once the process has ended."""
        async with asyncio.timeout(PATIENCE_S):
            _, log = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, [json.loads(line) for line in log.splitlines()]


@asynccontextmanager
async def process(**settings: str) -> AsyncIterator[Running]:
    pipe = asyncio.subprocess.PIPE
    env = environment(**{"LISTEN": "127.0.0.1:0", "ADMIN_LISTEN": "127.0.0.1:0", **settings})
    child = await asyncio.create_subprocess_exec(*COMMAND, stdout=pipe, stderr=pipe, env=env, cwd=ROOT)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            told = json.loads(await child.stdout.readline())
        async with open_channel(told["address"], MAX_MESSAGE_BYTES) as channel:
            yield Running(child, told, channel)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def test_it_says_where_it_listens_and_serves_there() -> None:
    async with process(METRICS_LISTEN="127.0.0.1:0") as running:
        assert running.told["event"] == "listening"
        assert running.told["address"].startswith("127.0.0.1:")
        health = await health_pb2_grpc.HealthStub(running.channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        peer = Peer(running.channel)
        assert (await peer.hello()).epoch == running.told["epoch"]
        assert len((await peer.step(acquires=[acquire(1, tokens(40))])).grants) == 1
        url = f"http://{running.told['metrics']}/metrics"
        text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=PATIENCE_S).read())).decode()
        assert 'stemcache_cache_leases{worker="w1"} 1.0' in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_well(number: signal.Signals) -> None:
    async with process() as running:
        health = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        stub: Any = cache_pb2_grpc.PrefixCacheStub(running.channel)
        watch = stub.Watch(cache_pb2.WatchRequest())
        await watch.read()
        peer = Peer(running.channel)
        await peer.hello()
        running.process.send_signal(number)
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await peer.ended() == (grpc.StatusCode.UNAVAILABLE, "session: the service is shutting down")
        # The worker came, and perhaps it is gone by now; the status comes after that.
        while await watch.read() is not grpc.aio.EOF:
            pass
        assert await watch.code() is grpc.StatusCode.OK
        code, log = await running.end()
        assert code == 0
        messages = [line["message"] for line in log]
        assert messages[-1] == "stopped"
        assert "stopping" in messages


async def test_the_log_tells_the_configuration_without_secrets() -> None:
    # Nobody listens at that address: the service must serve all the same.
    async with process(REDIS_URL="redis://me:hunter2@127.0.0.1:1/0", POLICY="slru") as running:
        await Peer(running.channel).hello()
        running.process.terminate()
        code, log = await running.end()
    serving = next(line for line in log if line["message"] == "serving")
    assert serving["core"] == os.environ.get("STEMCACHE_CORE", "python"), "the form of the manager that was asked for"
    assert serving["config"]["policy"] == "slru"
    assert serving["config"]["redis_url"] == "redis://me:***@127.0.0.1:1/0"
    assert "hunter2" not in json.dumps(log)
    assert code == 0
    assert [line for line in log if line["level"] not in ("info", "warning")] == []


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    async with process() as running:
        address = running.told["address"]
        ended = await asyncio.to_thread(run, LISTEN=address)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert f"cannot listen on {address}" in ended.stderr


def run(*argv: str, **settings: str) -> subprocess.CompletedProcess[str]:
    env = dict(environment(**settings))
    return subprocess.run(
        [*COMMAND, *argv], env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.mark.parametrize(
    ("name", "argv", "settings"),
    [
        ("STEMCACHE_CACHE_POLCY", [], {"POLCY": "lru"}),
        ("STEMCACHE_CACHE_POLICY", [], {"POLICY": "random"}),
        ("--tick-ms", ["--tick-ms", "0"], {}),
        ("--polcy", ["--polcy", "lru"], {}),
        ("listen", ["--listen", "nowhere"], {}),
        ("redis_url", ["--redis-url", "http://me:hunter2@host"], {}),
        ("redis_url", [], {"REDIS_URL": "redis://me:hunter2@host:port/x"}),
        ("redis_url", [], {"REDIS_URL": "redis://127.0.0.1:1/0?password=hunter2"}),
        ("redis_url", [], {"REDIS_URL": "redis://me:12/hunter2@127.0.0.1:1/0"}),
        ("redis_url", [], {"REDIS_URL": "redis://127.0.0.1:1/hunter2"}),
    ],
)
def test_bad_settings_are_named(name: str, argv: list[str], settings: dict[str, str]) -> None:
    ended = run("--listen=127.0.0.1:0", *argv, **settings)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("cache_service: error: "), ended.stderr
    assert name in ended.stderr
    assert "hunter2" not in ended.stderr


def test_help() -> None:
    ended = run("--help")
    assert ended.returncode == 0
    assert "--redis-url" in ended.stdout
    assert "STEMCACHE_CACHE_" in ended.stdout
