"""What refused texts cost somebody else: three tokens for a short prompt, alone and beside 30 texts of 0.5 MB each.

    python -m benchmarks.bench_long_texts [--texts N]

Starts a cache service and a worker with the model in the box on the CPU. The texts and the short prompts come from two
processes, so that the client does not wait for itself. Writes benchmarks/results/long_texts.json.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from typing import Any

import grpc
import grpc.aio

from benchmarks.host import on_this_machine
from benchmarks.processes import LISTEN, served
from benchmarks.report import RESULTS, parser, save
from protos.v1 import worker_pb2, worker_pb2_grpc
from register_qa import MODEL_FOLDER
from rpc.client import open_channel
from session.limits import MAX_MESSAGE_BYTES

TEXT_CHARS = 520_000
NUM_ALONE = 30


async def ask(stub: Any, text: str, number: int) -> float:
    """Seconds until the third token; every prompt has a namespace of its own, so nothing is reused."""
    sampling = worker_pb2.SamplingParams(max_tokens=3, ignore_eos=True)
    start_s = time.perf_counter()
    async for _ in stub.Generate(worker_pb2.GenerateRequest(text=text, sampling=sampling, salt=str(number))):
        pass
    return time.perf_counter() - start_s


async def flood(address: str, num_texts: int) -> None:
    """All texts at once; each must be refused."""
    draw = random.Random(1)
    text = "".join(draw.choices("etaoinshr ", k=TEXT_CHARS))
    async with open_channel(address, MAX_MESSAGE_BYTES) as channel:
        stub = worker_pb2_grpc.ModelWorkerStub(channel)
        asked = [ask(stub, text, number) for number in range(num_texts)]
        ended = await asyncio.gather(*asked, return_exceptions=True)
    codes = {error.code() for error in ended if isinstance(error, grpc.aio.AioRpcError)}
    if codes != {grpc.StatusCode.INVALID_ARGUMENT} or not all(isinstance(end, Exception) for end in ended):
        raise SystemExit(f"texts that ended otherwise than refused: {codes}")


async def measure(address: str, num_texts: int) -> dict[str, object]:
    async with open_channel(address, MAX_MESSAGE_BYTES) as channel:
        stub = worker_pb2_grpc.ModelWorkerStub(channel)
        alone = [await ask(stub, "hello there", 10_000 + at) for at in range(NUM_ALONE)]
        command = (sys.executable, "-m", "benchmarks.bench_long_texts", "--flood", address, "--texts", str(num_texts))
        start_s = time.perf_counter()
        flooding = await asyncio.create_subprocess_exec(*command)
        ended = asyncio.create_task(flooding.wait())
        beside: list[float] = []
        while not ended.done():
            beside.append(await ask(stub, "hello there", 20_000 + len(beside)))
        if ended.result():
            raise SystemExit("the flood failed")
        flood_s = time.perf_counter() - start_s
    return {
        "num_texts": num_texts,
        "text_chars": TEXT_CHARS,
        **{f"alone_{name}_ms": value for name, value in _spread(alone).items()},
        **{f"beside_{name}_ms": value for name, value in _spread(beside).items()},
        "flood_s": round(flood_s, 2),
        **on_this_machine(),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": round(ordered[len(ordered) // 2] * 1e3, 1), "max": round(ordered[-1] * 1e3, 1)}


def main() -> None:
    options = parser(__doc__, texts=30)
    options.add_argument("--flood", default="", help="only send the texts, to this address")
    arguments = options.parse_args()
    if arguments.flood:
        asyncio.run(flood(arguments.flood, arguments.texts))
        return
    model = ("--model", str(MODEL_FOLDER), "--device", "cpu", "--threads", "1")
    with (
        served("cache_service", *LISTEN) as cache,
        served("worker_service", *LISTEN, "--cache", cache.address, *model) as worker,
    ):
        result = asyncio.run(measure(worker.address, arguments.texts))
    save(result, RESULTS / "long_texts.json")


if __name__ == "__main__":
    main()
