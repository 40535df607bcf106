"""Step round trip over gRPC on loopback: 64 decoding sequences against a `python -m cache_service`.

    python -m benchmarks.bench_step [--steps N]

`server_cpu_us` is what the service's process spends on each Step, transport and all; `echo_cpu_us` is that of a bare
grpc.aio server that echoes messages of the same sizes, so nothing of ours could cost less. Every reply is checked: each
sequence that crosses a page gets exactly one page, no page is granted twice, and at the end the service counts 64
leases and the pages that we hold. Writes benchmarks/results/step.json.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import time
import zlib
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks.bench_core import machine
from protos.v1 import cache_pb2, cache_pb2_grpc, types_pb2
from rpc.client import open_channel
from rpc.lifecycle import run
from rpc.options import ServerLimits, server_options

NUM_SEQUENCES = 64
PROMPT_TOKENS = 512
PAGE = 16
WARM_STEPS = 200
RESULTS = Path(__file__).parent / "results" / "step.json"


class DecodingWorker:
    """Sequences that decode one token a launch, as an engine reports it; each starts at another offset in its page."""

    def __init__(self, channel: Any, num_steps: int) -> None:
        self._stub: Any = cache_pb2_grpc.PrefixCacheStub(channel)
        self._stream = self._stub.Session()
        self._lengths = {sequence: PROMPT_TOKENS + sequence % PAGE for sequence in range(1, NUM_SEQUENCES + 1)}
        self._published = dict(self._lengths)
        self._num_pages = NUM_SEQUENCES * (PROMPT_TOKENS // PAGE + num_steps // PAGE + 4)
        self._pages: set[int] = set()
        self._step_id = 0

    async def start(self) -> None:
        group = types_pb2.GroupSpec(name="full", kind=types_pb2.GROUP_KIND_FULL, num_pages=self._num_pages)
        hello = cache_pb2.Hello(
            protocol_version=2,
            worker_id="bench",
            incarnation="bench",
            fingerprint=bytes(32),
            page_tokens=PAGE,
            groups=[group],
            host_tier=cache_pb2.HOST_TIER_KIND_NONE,
            num_ranks=1,
            model="bench",
        )
        welcome = await say(self._stream, cache_pb2.WorkerMessage(hello=hello))
        assert welcome.WhichOneof("message") == "welcome"
        namespace = types_pb2.Namespace(model="bench")
        for sequence, length in self._lengths.items():
            tokens = array("i", range(sequence * 10_000, sequence * 10_000 + length)).tobytes()
            acquire = cache_pb2.Acquire(sequence_id=sequence, namespace=namespace, tokens=tokens, chunk_tokens=length)
            publish = cache_pb2.Publish(sequence_id=sequence, computed_tokens=length)
            granted = await self._ask(cache_pb2.Step(acquires=[acquire]))
            self._hold(granted.grants[0].tables[0].page_ids, -(-length // PAGE))
            await self._ask(cache_pb2.Step(publishes=[publish]))

    async def decode(self) -> float:
        """One launch of all sequences; how long its Step took."""
        crossing = []
        for sequence in self._lengths:
            self._lengths[sequence] += 1
            if self._lengths[sequence] % PAGE == 1:
                crossing.append(sequence)
        step = cache_pb2.Step(publishes=[self._publish(sequence) for sequence in crossing])
        lengths = [self._lengths[sequence] for sequence in crossing]
        step.extends.sequence_ids = struct.pack(f"<{len(crossing)}Q", *crossing)
        step.extends.num_tokens = struct.pack(f"<{len(crossing)}I", *lengths)
        started = time.perf_counter()
        reply = await self._ask(step)
        took = time.perf_counter() - started
        assert reply.extends.sequence_ids == step.extends.sequence_ids
        self._hold(reply.extends.page_ids, len(crossing))
        return took

    def _publish(self, sequence: int) -> cache_pb2.Publish:
        """The page that is full now."""
        computed = self._lengths[sequence] - 1
        new = array("i", range(self._published[sequence], computed)).tobytes()
        self._published[sequence] = computed
        return cache_pb2.Publish(sequence_id=sequence, tokens=new, computed_tokens=computed)

    def _hold(self, page_ids: bytes, expected: int) -> None:
        ids = struct.unpack(f"<{len(page_ids) // 4}I", page_ids)
        assert len(ids) == expected and self._pages.isdisjoint(ids), "a page too few, too many, or granted twice"
        self._pages.update(ids)

    async def _ask(self, step: cache_pb2.Step) -> cache_pb2.StepReply:
        self._step_id += 1
        step.step_id = self._step_id
        reply = (await say(self._stream, cache_pb2.WorkerMessage(step=step))).step_reply
        assert reply.step_id == self._step_id and not reply.refusals
        return reply

    async def check(self) -> None:
        (worker,) = (await self._stub.Stats(cache_pb2.StatsRequest())).workers
        assert worker.num_leases == NUM_SEQUENCES
        assert worker.groups[0].num_free == self._num_pages - len(self._pages)


async def say(stream: Any, message: cache_pb2.WorkerMessage) -> cache_pb2.ManagerMessage:
    """The answer to one message of a session."""
    body = message.SerializeToString()
    await stream.write(cache_pb2.SessionRequest(body=body, crc32=zlib.crc32(body)))
    envelope = await stream.read()
    assert zlib.crc32(envelope.body) == envelope.crc32
    return cache_pb2.ManagerMessage.FromString(envelope.body)


class Echo(grpc.GenericRpcHandler):
    """A grpc.aio server's least: each message is answered with `REPLY`, and nothing is decoded."""

    REPLY = bytes(102)
    REQUEST = bytes(360)

    def service(self, handler_call_details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._serve)

    async def _serve(self, _: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(self.REPLY)


async def echo() -> None:
    """Serves until its process is terminated."""
    server = grpc.aio.server(options=server_options(ServerLimits()))
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    await server.wait_for_termination()


async def measure_echo(address: str, num_steps: int, pid: int) -> float:
    """CPU seconds that an echo server spends on messages of the Steps' sizes: what gRPC costs without us."""
    async with open_channel(address) as channel:
        stream: Any = channel.stream_stream("/bench/Echo")()
        for step in range(WARM_STEPS + num_steps):
            if step == WARM_STEPS:
                before = cpu_s(pid)
            await stream.write(Echo.REQUEST)
            await stream.read()
        spent = cpu_s(pid) - before
        stream.cancel()
        return spent / num_steps


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(address: str, num_steps: int, pid: int) -> tuple[list[float], float]:
    """Returns the sorted times of all Steps, and the service's CPU seconds for each."""
    async with open_channel(address) as channel:
        worker = DecodingWorker(channel, num_steps + WARM_STEPS)
        await worker.start()
        for _ in range(WARM_STEPS):
            await worker.decode()
        before = cpu_s(pid)
        times = [await worker.decode() for _ in range(num_steps)]
        spent = cpu_s(pid) - before
        await worker.check()
        return sorted(times), spent / num_steps


@contextmanager
def served(module: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """The address and the process id of a server that runs while inside."""
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"], process.pid
    finally:
        process.terminate()
        process.wait()


def cache_service() -> AbstractContextManager[tuple[str, int]]:
    return served("cache_service", "--listen", "127.0.0.1:0", "--admin-listen", "", "--log-level", "warning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--echo", action="store_true", help="be the echo server")
    told = parser.parse_args()
    if told.echo:
        run(echo())
        return
    num_steps = told.steps
    with cache_service() as (address, pid):
        times, spent_s = run(measure(address, num_steps, pid))
    with served("benchmarks.bench_step", "--echo") as (address, pid):
        echo_s = run(measure_echo(address, num_steps, pid))
    result: dict[str, object] = {
        "num_sequences": NUM_SEQUENCES,
        "num_steps": num_steps,
        **{f"step_p{q}_ms": round(times[num_steps * q // 100] * 1e3, 3) for q in (50, 90, 99)},
        "server_cpu_us": round(spent_s * 1e6, 1),
        "echo_cpu_us": round(echo_s * 1e6, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "machine": machine(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
