"""Time how long a restarted cache service takes to adopt everything that its workers run. Fails when an audit does.

    python -m benchmarks.bench_adopt [--workers N] [--sequences N] [--pages N] [--pool N]

Without a network: each worker's Steps go through the codec as bytes, and through the manager. Every sequence must be
granted its own pages. Cycles are collected as in the service's own process. Writes benchmarks/results/adopt.json; times
are those of this thread's CPU.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Iterator

from benchmarks.host import on_this_machine
from benchmarks.report import RESULTS, parser, save
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from protos.v1 import cache_pb2, types_pb2
from rpc.collector import LONG_LIVED, seldom_collected
from session.messages import Hello
from session.wire.reply import encode_reply
from session.wire.step import decode_step
from session.words import GroupKind, GroupSpec, WorkerId
from tests.core import audit

PAGE_TOKENS = 16
MODEL = "bench"


def hello(name: WorkerId, num_pages: int) -> Hello:
    groups = (GroupSpec("full", GroupKind.FULL, num_pages),)
    return Hello(name, "bench:1", "bench", bytes(32), PAGE_TOKENS, groups, model=MODEL)


def adopts(seed: int, num_sequences: int, num_pages: int, pool: int) -> Iterator[cache_pb2.Adopt]:
    """Sequences of a busy worker: their pages lie anywhere in its pool."""
    rng = random.Random(seed)
    page_ids = array("I", rng.sample(range(1, pool + 1), num_sequences * num_pages))
    for number in range(num_sequences):
        tokens = array("i", (rng.randrange(50_000) for _ in range(num_pages * PAGE_TOKENS)))
        own = page_ids[number * num_pages : (number + 1) * num_pages]
        yield cache_pb2.Adopt(
            sequence_id=number + 1,
            namespace=types_pb2.Namespace(model=MODEL),
            tokens=tokens.tobytes(),
            computed_tokens=len(tokens) - 1,
            tables=[types_pb2.GroupPages(group=0, page_ids=own.tobytes())],
        )


def steps(seed: int, num_sequences: int, num_pages: int, pool: int, max_pages: int) -> list[bytes]:
    """Serialized, each with as many adopts as one Step may have."""
    out, step, named = [], cache_pb2.Step(step_id=1), 0
    for adopt in adopts(seed, num_sequences, num_pages, pool):
        if named and named + num_pages > max_pages:
            out.append(step.SerializeToString())
            step, named = cache_pb2.Step(step_id=step.step_id + 1), 0
        step.adopts.append(adopt)
        named += num_pages
    return [*out, step.SerializeToString()]


def apply(manager: CacheManager, name: WorkerId, raw: bytes) -> tuple[int, float]:
    """Returns how many sequences were granted, and the CPU seconds of the whole Step."""
    started = time.thread_time()
    step = decode_step(cache_pb2.Step.FromString(raw), manager.limits)
    reply = manager.step(name, step, 0)
    encode_reply(reply, 1).SerializeToString()
    took = time.thread_time() - started
    assert not reply.refusals, reply.refusals[0]
    return len(reply.grants), took


def measure(num_workers: int, num_sequences: int, num_pages: int, pool: int, watch: bool) -> dict[str, object]:
    manager = CacheManager(ManagerConfig(watch=watch), "bench")
    times: list[float] = []
    for number in range(num_workers):
        name = WorkerId(f"w{number}")
        manager.hello(hello(name, pool), 0)
        granted = 0
        for raw in steps(number, num_sequences, num_pages, pool, manager.limits.max_adopt_pages):
            count, took = apply(manager, name, raw)
            granted += count
            times.append(took)
            manager.take_events()
        assert granted == num_sequences, f"{num_sequences - granted} sequences lost"
    audit.check(manager)
    times.sort()
    return {
        "cpu_s": round(sum(times), 3),
        "num_steps": len(times),
        "step_p50_ms": round(times[len(times) // 2] * 1e3, 2),
        "step_p99_ms": round(times[len(times) * 99 // 100] * 1e3, 2),
        "step_max_ms": round(times[-1] * 1e3, 2),
        "us_per_page": round(sum(times) / (num_workers * num_sequences * num_pages) * 1e6, 2),
    }


def main() -> None:
    told = parser(__doc__, workers=64, sequences=64, pages=128, pool=1_000_000).parse_args()
    shape = (told.workers, told.sequences, told.pages, told.pool)
    with seldom_collected(LONG_LIVED):
        measured = {"watch_on": measure(*shape, watch=True), "watch_off": measure(*shape, watch=False)}
    result = {
        "num_workers": told.workers,
        "sequences_per_worker": told.sequences,
        "pages_per_sequence": told.pages,
        "pool_pages": told.pool,
        "max_adopt_pages": ManagerConfig().max_adopt_pages,
        **measured,
        **on_this_machine(),
    }
    save(result, RESULTS / "adopt.json")


if __name__ == "__main__":
    main()
