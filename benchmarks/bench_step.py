"""Step round trip over gRPC on loopback: 64 decoding sequences against a `python -m cache_service`.

    python -m benchmarks.bench_step [--steps N]

Every reply is checked: each sequence that crosses a page gets exactly one page, no page is granted twice, and at the
end the service counts 64 leases and the pages that we hold. Writes benchmarks/results/step.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import struct
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from protos.v1 import cache_pb2, cache_pb2_grpc, types_pb2
from rpc.client import open_channel
from rpc.lifecycle import run

NUM_SEQUENCES = 64
PROMPT_TOKENS = 512
PAGE = 16
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
            protocol_version=1,
            worker_id="bench",
            incarnation="bench",
            fingerprint=bytes(32),
            page_tokens=PAGE,
            groups=[group],
            host_tier=cache_pb2.HOST_TIER_KIND_NONE,
            num_ranks=1,
        )
        await self._stream.write(cache_pb2.SessionRequest(hello=hello))
        assert (await self._stream.read()).WhichOneof("message") == "welcome"
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
        await self._stream.write(cache_pb2.SessionRequest(step=step))
        reply: cache_pb2.StepReply = (await self._stream.read()).step_reply
        assert reply.step_id == self._step_id and not reply.refusals
        return reply

    async def check(self) -> None:
        (worker,) = (await self._stub.Stats(cache_pb2.StatsRequest())).workers
        assert worker.num_leases == NUM_SEQUENCES
        assert worker.groups[0].num_free == self._num_pages - len(self._pages)


async def measure(address: str, num_steps: int) -> list[float]:
    async with open_channel(address) as channel:
        worker = DecodingWorker(channel, num_steps)
        await worker.start()
        times = [await worker.decode() for _ in range(num_steps)]
        await worker.check()
        return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4_000)
    num_steps = parser.parse_args().steps
    command = [sys.executable, "-m", "cache_service", "--listen", "127.0.0.1:0", "--log-level", "warning"]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        times = run(measure(json.loads(service.stdout.readline())["address"], num_steps))
    finally:
        service.terminate()
        service.wait()
    result: dict[str, object] = {
        "num_sequences": NUM_SEQUENCES,
        "num_steps": num_steps,
        **{f"step_p{q}_ms": round(times[num_steps * q // 100] * 1e3, 3) for q in (50, 90, 99)},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
