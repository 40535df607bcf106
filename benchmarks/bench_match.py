"""What a Match of 8,192 tokens costs a service with 64 workers, over gRPC on loopback.

    python -m benchmarks.bench_match [--turns N]

Each worker has another part of the prompt cached, an eighth more than the one before, and every answer is checked.
`server_cpu_us` is what the service's process spends on each call, transport and all; `bare_call_cpu_us` is that of a
call about a model that nobody runs. They are asked in turns of 50 calls; the figures are medians of the turns, since
the machine may be shared. Writes benchmarks/results/match.json.
"""

from __future__ import annotations

import time
from array import array
from statistics import median
from typing import Any

from benchmarks.host import on_this_machine
from benchmarks.processes import MODEL, cache_service, cpu_s, hello, say
from benchmarks.processes import PAGE_TOKENS as PAGE
from benchmarks.report import RESULTS, parser, save
from protos.v1 import cache_pb2, cache_pb2_grpc, types_pb2
from rpc.client import open_channel
from rpc.lifecycle import run
from session.limits import MAX_MESSAGE_BYTES

NUM_WORKERS = 64
NUM_TOKENS = 8_192
WARM_CALLS = 50
TURN_CALLS = 50
NAMESPACE = types_pb2.Namespace(model=MODEL)
TOKENS = array("i", range(NUM_TOKENS)).tobytes()


def cached_tokens(number: int) -> int:
    return NUM_TOKENS * (number % 8 + 1) // 8


async def connect(stub: Any, number: int) -> Any:
    """A worker's stream, which has published its part of the prompt and released it."""
    stream = stub.Session()
    await say(stream, hello(f"worker-{number}", 2 * NUM_TOKENS // PAGE, endpoint=f"10.0.0.{number}:50052"))
    acquire = cache_pb2.Acquire(sequence_id=1, namespace=NAMESPACE, tokens=TOKENS)
    publish = cache_pb2.Publish(sequence_id=1, computed_tokens=cached_tokens(number))
    release = cache_pb2.Release(sequence_id=1, reason=cache_pb2.RELEASE_REASON_FINISHED)
    steps = (
        cache_pb2.Step(step_id=1, acquires=[acquire]),
        cache_pb2.Step(step_id=2, publishes=[publish], releases=[release]),
    )
    for step in steps:
        reply = (await say(stream, cache_pb2.WorkerMessage(step=step))).step_reply
        assert reply.step_id == step.step_id and not reply.refusals
    return stream


async def measure(address: str, num_turns: int, pid: int) -> dict[str, float]:
    async with open_channel(address, MAX_MESSAGE_BYTES) as channel:
        stub: Any = cache_pb2_grpc.PrefixCacheStub(channel)
        streams = [await connect(stub, number) for number in range(NUM_WORKERS)]
        asked = cache_pb2.MatchRequest(namespace=NAMESPACE, tokens=TOKENS)
        unknown = cache_pb2.MatchRequest(namespace=types_pb2.Namespace(model="nobody's"), tokens=TOKENS[:4])
        matched = [min(cached_tokens(number), NUM_TOKENS - PAGE) for number in range(NUM_WORKERS)]
        times: list[float] = []
        spent: list[float] = []
        bare: list[float] = []
        for _ in range(WARM_CALLS):
            await stub.Match(asked)
        for _ in range(num_turns):
            before = cpu_s(pid)
            for _ in range(TURN_CALLS):
                started = time.perf_counter()
                answer = await stub.Match(asked)
                times.append(time.perf_counter() - started)
                assert [worker.match.usable_tokens for worker in answer.workers] == matched
            between = cpu_s(pid)
            for _ in range(TURN_CALLS):
                assert not (await stub.Match(unknown)).workers
            spent.append((between - before) / TURN_CALLS)
            bare.append((cpu_s(pid) - between) / TURN_CALLS)
        for stream in streams:
            stream.cancel()
    return {
        "match_p50_ms": round(median(times) * 1e3, 3),
        "server_cpu_us": round(median(spent) * 1e6, 1),
        "server_cpu_us_best_turn": round(min(spent) * 1e6, 1),
        "bare_call_cpu_us": round(median(bare) * 1e6, 1),
        "bare_call_cpu_us_best_turn": round(min(bare) * 1e6, 1),
    }


def main() -> None:
    num_turns = parser(__doc__, turns=25).parse_args().turns
    with cache_service() as service:
        measured = run(measure(service.address, num_turns, service.pid))
    result = {
        "num_workers": NUM_WORKERS,
        "num_tokens": NUM_TOKENS,
        "num_calls": num_turns * TURN_CALLS,
        **measured,
        **on_this_machine(),
    }
    save(result, RESULTS / "match.json")


if __name__ == "__main__":
    main()
