"""Step round trip over gRPC on loopback: 64 decoding sequences against a `python -m cache_service`.

    python -m benchmarks.bench_step [--turns N]

`server_cpu_us` is what the service's process spends on each Step, transport and all; `echo_cpu_us` is that of a bare
grpc.aio server that echoes messages of the same sizes, so nothing of ours could cost less. Both run at the same time
and are asked in turns of 200 messages; the figures are medians of the turns, since the machine may be shared. Every
reply is checked: each sequence that crosses a page gets exactly one page, no page is granted twice, and at the end the
service counts 64 leases and the pages that we hold. Writes benchmarks/results/step.json.
"""

from __future__ import annotations

import json
import struct
import time
from array import array
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any, NamedTuple

import grpc
import grpc.aio

from benchmarks.host import on_this_machine
from benchmarks.processes import MODEL, Server, cache_service, cpu_s, hello, say, served
from benchmarks.processes import PAGE_TOKENS as PAGE
from benchmarks.report import RESULTS, parser, save
from protos.v1 import cache_pb2, cache_pb2_grpc, types_pb2
from rpc.client import open_channel
from rpc.lifecycle import run
from rpc.options import ServerLimits, server_options
from session.limits import MAX_MESSAGE_BYTES

NUM_SEQUENCES = 64
PROMPT_TOKENS = 512
WARM_STEPS = 200
TURN_STEPS = 200


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
        welcome = await say(self._stream, hello("bench", self._num_pages))
        assert welcome.WhichOneof("message") == "welcome"
        namespace = types_pb2.Namespace(model=MODEL)
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
    server = grpc.aio.server(options=server_options(ServerLimits(MAX_MESSAGE_BYTES)))
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    await server.wait_for_termination()


class EchoClient:
    """Sends messages of the Steps' sizes."""

    def __init__(self, channel: Any) -> None:
        self._stream: Any = channel.stream_stream("/bench/Echo")()

    async def ask(self) -> float:
        """Returns how long one message took."""
        started = time.perf_counter()
        await self._stream.write(Echo.REQUEST)
        await self._stream.read()
        return time.perf_counter() - started


class Turns(NamedTuple):
    """How long each message took, and the server's CPU seconds a message in each turn."""

    times: list[float]
    cpu_s: list[float]

    async def take(self, ask: Callable[[], Awaitable[float]], pid: int) -> None:
        before = cpu_s(pid)
        self.times.extend([await ask() for _ in range(TURN_STEPS)])
        self.cpu_s.append((cpu_s(pid) - before) / TURN_STEPS)


async def measure(service: Server, echo_server: Server, num_turns: int) -> tuple[Turns, Turns]:
    steps, echoes = Turns([], []), Turns([], [])
    async with (
        open_channel(service.address, MAX_MESSAGE_BYTES) as channel,
        open_channel(echo_server.address, MAX_MESSAGE_BYTES) as echo_channel,
    ):
        worker, client = DecodingWorker(channel, num_turns * TURN_STEPS + WARM_STEPS), EchoClient(echo_channel)
        await worker.start()
        for _ in range(WARM_STEPS):
            await worker.decode()
            await client.ask()
        for _ in range(num_turns):
            await steps.take(worker.decode, service.pid)
            await echoes.take(client.ask, echo_server.pid)
        await worker.check()
    return steps, echoes


def main() -> None:
    options = parser(__doc__, turns=20)
    options.add_argument("--echo", action="store_true", help="be the echo server")
    told = options.parse_args()
    if told.echo:
        run(echo())
        return
    with cache_service() as service, served("benchmarks.bench_step", "--echo") as echo_server:
        steps, echoes = run(measure(service, echo_server, told.turns))
    times = sorted(steps.times)
    result: dict[str, object] = {
        "num_sequences": NUM_SEQUENCES,
        "num_steps": len(times),
        **{f"step_p{q}_ms": round(times[len(times) * q // 100] * 1e3, 3) for q in (50, 90, 99)},
        "server_cpu_us": round(median(steps.cpu_s) * 1e6, 1),
        "server_cpu_us_best_turn": round(min(steps.cpu_s) * 1e6, 1),
        "echo_cpu_us": round(median(echoes.cpu_s) * 1e6, 1),
        "echo_cpu_us_best_turn": round(min(echoes.cpu_s) * 1e6, 1),
        **on_this_machine(),
    }
    save(result, RESULTS / "step.json")


if __name__ == "__main__":
    main()
