"""Starts `python -m MODULE` in milliseconds: a process that has imported PyTorch and the services forks for each one.

A fresh interpreter spends three seconds of CPU on these imports, and the tests start some two hundred of them. A child
differs from one that was started by exec in nothing else: own environment, arguments, streams, signals and exit. Where
that cannot be had, because a variable counts only when an interpreter starts, the child execs.

    tests ── request, 3 streams, status pipe ──▶ server ── fork ──▶ child: runs the module as __main__
      ◀────────── status pipe: pid, then exit code ────┘

The tests' own process must not fork by itself (preexec_fn): gRPC's threads in it may hold locks, and the child dies of
them now and then before its exec.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple, NoReturn, Protocol

from rpc.listener import choose_listener

ROOT = Path(__file__).parent.parent
# What the services and the command import; none of it may start a thread.
PRELOADED = (
    "worker_service.bootstrap",
    "cache_service.bootstrap",
    "cli.ask",
    "cli.doctor",
    "cli.drain",
    "cli.evaluation.command",
    "cli.generate",
    "cli.inspect",
    "cli.replay.command",
    "cli.serve",
    "cli.status",
)
# Read by the interpreter, or by libraries while they are imported. The server imports no client of the hub, which reads
# HF_ in the child.
START_VARIABLES = (
    "PYTHON",
    "LD_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "TRITON_",
    "TORCH_",
    "CUDA_",
    "GRPC_",
    "MALLOC_",
)
MAX_REQUEST = 1 << 20
_PID = struct.Struct("<q")
_CODE = struct.Struct("<i")

Stream = IO[bytes] | int


class Process(Protocol):
    """What the tests use of subprocess.Popen."""

    pid: int
    stdout: IO[bytes] | None
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class ForkedProcess:
    """A child of the server; `returncode` is negative after a signal, as subprocess has it."""

    def __init__(self, name: str, status: int, stdout: IO[bytes] | None) -> None:
        self._name, self._status = name, status
        self.stdout = stdout
        self.returncode: int | None = None
        self.pid: int = _PID.unpack(_read(status, _PID.size))[0]

    def poll(self) -> int | None:
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self._name, timeout or 0.0)
        return code

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = _CODE.unpack(_read(self._status, _CODE.size))[0]
            os.close(self._status)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    module: str,
    *arguments: str,
    environment: Mapping[str, str],
    stdout: Stream = subprocess.DEVNULL,
    stderr: Stream = subprocess.DEVNULL,
) -> Process:
    """`python -m module arguments...` without input; `stdout` and `stderr` as subprocess takes them."""
    return _server().start(module, arguments, environment, stdout, stderr)


def run(
    module: str, *arguments: str, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """The same to its end. Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(module, *arguments, environment=environment, stdout=out, stderr=err)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([module, *arguments], code, out.read().decode(), err.read().decode())


def _needs_exec(environment: Mapping[str, str]) -> bool:
    mine = _server_environment()
    return any(
        environment.get(name) != mine.get(name) for name in (*environment, *mine) if name.startswith(START_VARIABLES)
    )


def _server_environment() -> dict[str, str]:
    # One thread for sums, as for all services that tests start.
    return dict(os.environ)


@cache
def _server() -> _Server:
    return _Server()


class _Server:
    """The test process's end; the other one ends with it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=_server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST)
        atexit.register(self._close)

    def _close(self) -> None:
        self._control.close()
        self._process.wait()

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], stdout: Stream, stderr: Stream
    ) -> ForkedProcess:
        request = {
            "module": module,
            "arguments": arguments,
            "environment": dict(environment),
            "cwd": str(Path.cwd()),
            "execs": _needs_exec(environment),
        }
        with contextlib.ExitStack() as stack:
            null = stack.enter_context(Path(os.devnull).open("r+b", buffering=0))
            status, their_status = os.pipe()
            stack.callback(os.close, their_status)
            reader: IO[bytes] | None = None
            out: Stream = stdout
            if stdout == subprocess.PIPE:
                ours, theirs = os.pipe()
                reader, out = os.fdopen(ours, "rb"), theirs
                stack.callback(os.close, theirs)
            streams = [null.fileno(), *(_descriptor(stream, null) for stream in (out, stderr)), their_status]
            socket.send_fds(self._control, [json.dumps(request).encode()], streams)
        return ForkedProcess(module, status, reader)


def _descriptor(stream: Stream, null: IO[bytes]) -> int:
    if stream == subprocess.DEVNULL:
        return null.fileno()
    return stream if isinstance(stream, int) else stream.fileno()


def _read(status: int, size: int) -> bytes:
    data = os.read(status, size)
    assert len(data) == size, "the server of the tests' processes has ended"
    return data


# The server's side.


class Request(NamedTuple):
    module: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    execs: bool
    streams: list[int]


def serve(control: socket.socket) -> Request | None:
    """Forks for each request. Returns twice: the request in each child, None once the tests have ended."""
    children: dict[int, int] = {}
    wake_in, wake_out = os.pipe()
    for end in (wake_in, wake_out):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Ctrl-C is for the tests, which then end this process by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(wake_in, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wake_in:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_in, 4096)
                    _reap(children)
                    continue
                message, streams, _, _ = socket.recv_fds(control, MAX_REQUEST, 4)
                if not message:
                    for pid in children:
                        os.kill(pid, signal.SIGKILL)
                    return None
                *streams, status = streams
                if pid := os.fork():
                    children[pid] = status
                    os.write(status, _PID.pack(pid))
                    for stream in streams:
                        os.close(stream)
                    continue
                signal.set_wakeup_fd(-1)
                for end in (control.fileno(), wake_in, wake_out, status, *children.values()):
                    os.close(end)
                return Request(**json.loads(message), streams=streams)


def _reap(children: dict[int, int]) -> None:
    for pid, status in list(children.items()):
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(BrokenPipeError):
                os.write(status, _CODE.pack(os.waitstatus_to_exitcode(code)))
            os.close(status)
            del children[pid]


def become(request: Request) -> NoReturn:
    """Run the module as `python -m` would, and end the process."""
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if request.execs:
        # A shell's background job ignores Ctrl-C, and so would every process that it starts.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(request.cwd)
        command = [sys.executable, "-m", request.module, *request.arguments]
        os.execve(sys.executable, command, request.environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.cwd)
    sys.argv[1:] = request.arguments
    code = 0
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:
        traceback.print_exc()
        code = 1
    # As an interpreter ends, but for taking PyTorch's modules apart, which would copy every page of memory.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    choose_listener(os.environ)  # as the services do, before gRPC is imported
    for module in PRELOADED:
        importlib.import_module(module)
    assert threading.active_count() == 1 == len(list(Path("/proc/self/task").iterdir())), "forking would lose threads"
    # Collections in the children pass over what is here now: looking at an object would copy its page.
    gc.collect()
    gc.freeze()
    request = serve(control)
    control.detach()
    if request is not None:
        become(request)


if __name__ == "__main__":
    main()
