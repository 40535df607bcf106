"""Services in processes of their own, the CPU time that they take, and a bare worker's side of a session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from protos.v1 import cache_pb2
from rpc.listener import choose_listener
from session.messages import Hello
from session.wire.hello import encode_hello
from session.wire.seal import open_response, seal_request
from session.words import GroupKind, GroupSpec, WorkerId

LISTEN = ("--listen", "127.0.0.1:0", "--admin-listen", "", "--log-level", "warning")
MODEL, PAGE_TOKENS = "bench", 16


class Server(NamedTuple):
    address: str
    pid: int


@contextmanager
def served(module: str, *arguments: str) -> Iterator[Server]:
    """A server in a process of its own that runs while inside, with the listener that ours choose."""
    environ = dict(os.environ)
    choose_listener(environ)
    command = (sys.executable, "-m", module, *arguments)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert process.stdout is not None
        yield Server(json.loads(process.stdout.readline())["address"], process.pid)
    finally:
        process.terminate()
        process.wait()


def cache_service() -> AbstractContextManager[Server]:
    return served("cache_service", *LISTEN)


def cpu_s(pid: int) -> float:
    """Time that all threads of a process ran."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def hello(worker_id: str, num_pages: int, endpoint: str = "") -> cache_pb2.WorkerMessage:
    """Of a worker with one FULL group and no host tier."""
    groups = (GroupSpec("full", GroupKind.FULL, num_pages),)
    return encode_hello(Hello(WorkerId(worker_id), endpoint, "bench", bytes(32), PAGE_TOKENS, groups, model=MODEL))


async def say(stream: Any, message: cache_pb2.WorkerMessage) -> cache_pb2.ManagerMessage:
    """Returns the answer to one message of a session."""
    await stream.write(seal_request(message))
    return open_response(await stream.read())
