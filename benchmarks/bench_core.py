"""Time the manager alone: a trace (also as a share of a small baseline), the longest match, a chunked publish, one
eviction. Fails when an audit does.

`python -m benchmarks.bench_core [--trace PATH]`; without a trace the generator's traffic is used, whose hit rates are
not comparable.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, process_time

from benchmarks.baseline_manager import BaselineManager
from benchmarks.host import on_this_machine
from benchmarks.report import RESULTS, parser, save
from benchmarks.token_requests import token_requests
from cache_service.compiled import CORE_FORM, IS_COMPILED
from cache_service.core.cache_manager import CacheManager
from cli.replay import replay
from session.messages import Acquire, Grant, Publish, Release
from session.words import ReleaseReason, SequenceId
from tests.core import audit

NUM_REQUESTS = 5_000
PAGE_TOKENS = 16
RUNS = 5
LONG_TOKENS = 100_000
TURN_REQUESTS = 100


def load(trace: Path | None) -> list[replay.Request]:
    if trace is not None:
        return list(replay.read_trace(trace, NUM_REQUESTS))
    return list(token_requests(1, NUM_REQUESTS))


def run_trace(requests: Iterable[replay.Request], num_pages: int, policy: str) -> replay.Replay:
    """A run counts only if the audit after it is clean and nothing is left held."""
    gc.collect()  # the trees of the run before, which no run should pay for
    manager = replay.make_manager(num_pages, PAGE_TOKENS, policy)
    figures = replay.replay(manager, requests)
    audit.check(manager)
    (worker,) = manager.stats().workers
    assert worker.num_leases == worker.num_tickets == 0
    return figures


def share_of_baseline(requests: list[replay.Request], num_pages: int) -> dict[str, float]:
    """The manager beside the least that a cache must do, in turns, in CPU time: the machine may be shared."""
    gc.collect()
    manager, baseline = replay.make_manager(num_pages, PAGE_TOKENS, "lru"), BaselineManager(num_pages)
    own, least = array("d"), array("d")
    for first in range(0, len(requests), TURN_REQUESTS):
        turn = requests[first : first + TURN_REQUESTS]
        for number, (read, output) in enumerate(turn, first + 1):
            prompt = bytes(bytearray(read))
            start = process_time()
            replay.one_request(manager, SequenceId(number), prompt, output)
            own.append(process_time() - start)
        for read, output in turn:
            prompt = bytes(bytearray(read))
            start = process_time()
            baseline.request(prompt, output)
            least.append(process_time() - start)
    audit.check(manager)
    return {
        "share_of_baseline_200k": round(sum(least) / sum(own), 3),
        **cpu_figures("", own),
        **cpu_figures("baseline_", least),
    }


def cpu_figures(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Of requests' CPU times, which other work on the machine blurs less than its clock's."""
    ordered = sorted(seconds)
    return {
        f"{name}requests_per_cpu_s_200k": round(len(ordered) / sum(ordered), 1),
        f"{name}cpu_p50_ms_200k": round(ordered[len(ordered) // 2] * 1e3, 4),
        f"{name}cpu_p99_ms_200k": round(ordered[len(ordered) * 99 // 100] * 1e3, 4),
    }


def random_tokens(seed: int, num_tokens: int) -> bytes:
    rng = Random(seed)
    return array("i", (rng.randrange(replay.VOCABULARY) for _ in range(num_tokens))).tobytes()


def publish_prompt(manager: CacheManager, number: int, tokens: bytes) -> None:
    """Computes a prompt whole, and leaves it cached."""
    sequence = SequenceId(number)
    assert isinstance(manager.acquire(replay.WORKER, Acquire(sequence, replay.NAMESPACE, tokens)), Grant)
    manager.publish(replay.WORKER, Publish(sequence, b"", len(tokens) // 4))
    manager.release(replay.WORKER, Release(sequence, ReleaseReason.FINISHED))


def best_us(run: Callable[[], object], repeat: int) -> float:
    """The median of `repeat` runs, in microseconds."""
    times = []
    for _ in range(repeat):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return median(times) * 1e6


def match_100k_us() -> float:
    """The worst of: the identical prompt, one token more, one that diverges in the middle."""
    manager = replay.make_manager(50_000, PAGE_TOKENS, "lru")
    tokens = random_tokens(2, LONG_TOKENS)
    publish_prompt(manager, 1, tokens)
    middle = LONG_TOKENS // 2 * 4
    prompts = {
        tokens: (LONG_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS,
        tokens + random_tokens(3, 1): LONG_TOKENS // PAGE_TOKENS * PAGE_TOKENS,
        tokens[:middle] + random_tokens(4, LONG_TOKENS // 2): LONG_TOKENS // 2 // PAGE_TOKENS * PAGE_TOKENS,
    }
    for prompt, expected in prompts.items():
        assert manager.match(replay.NAMESPACE, prompt)[0].match.usable_tokens == expected
    audit.check(manager)
    return max(best_us(lambda p=prompt: manager.match(replay.NAMESPACE, p), 301) for prompt in prompts)  # type: ignore[misc]


def publish_195_chunks_ms() -> float:
    """100,000 tokens, published chunk by chunk as a prefill would."""
    tokens, chunk = random_tokens(5, LONG_TOKENS), -(-LONG_TOKENS // 195)
    totals = []
    for _ in range(RUNS):
        manager = replay.make_manager(50_000, PAGE_TOKENS, "lru")
        sequence = SequenceId(1)
        manager.acquire(replay.WORKER, Acquire(sequence, replay.NAMESPACE, tokens))
        ends = [min(end, LONG_TOKENS) for end in range(chunk, LONG_TOKENS + chunk, chunk)]
        assert len(ends) == 195
        start = perf_counter()
        for end in ends:
            manager.publish(replay.WORKER, Publish(sequence, b"", end))
        totals.append(perf_counter() - start)
        assert manager.stats().workers[0].num_nodes == 1
        audit.check(manager)
    return median(totals) * 1e3


def evict_one() -> tuple[float, int]:
    """One page among 100,000 one-page leaves: median time, and how many pages each eviction freed."""
    num_leaves = 100_000
    manager = replay.make_manager(num_leaves, PAGE_TOKENS, "lru")
    for number in range(1, num_leaves + 1):
        publish_prompt(manager, number, array("i", [number] * PAGE_TOKENS).tobytes())
    cache = manager.worker(replay.WORKER)
    (pool,) = cache.pools.values()
    freed = []
    times = []
    for _ in range(1_001):
        before = pool.num_free
        start = perf_counter()
        cache.evict(1)
        times.append(perf_counter() - start)
        freed.append(pool.num_free - before)
    audit.check(manager)
    assert len(set(freed)) == 1
    return median(times) * 1e6, freed[0]


def measure(trace: Path | None) -> dict[str, object]:
    requests = load(trace)
    at_200k = [run_trace(requests, 200_000, "lru") for _ in range(RUNS)]
    others = {policy: run_trace(requests, 200_000, policy).hit_rate for policy in ("adaptive", "slru", "priority")}
    rates = {"lru": at_200k[0].hit_rate, **others}
    best = max(rates, key=lambda policy: rates[policy])
    evict_us, evict_pages = evict_one()
    return {
        "core": CORE_FORM,
        "requests_per_s_200k": round(median(run.requests_per_s for run in at_200k), 1),
        "p99_ms_200k": round(median(run.p99_ms for run in at_200k), 4),
        **share_of_baseline(requests, 200_000),
        "hit_rate_50k": round(run_trace(requests, 50_000, "lru").hit_rate, 4),
        "hit_rate_200k": round(at_200k[0].hit_rate, 4),
        "hit_rate_unlimited": round(run_trace(requests, 0, "lru").hit_rate, 4),
        "best_policy": best,
        "best_hit_rate_200k": round(rates[best], 4),
        "match_100k_us": round(match_100k_us(), 2),
        "publish_195_chunks_ms": round(publish_195_chunks_ms(), 3),
        "evict_one_us": round(evict_us, 2),
        "evict_one_pages": evict_pages,
        **on_this_machine(),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, help="a trace in Mooncake's format")
    trace = options.parse_args().trace
    try:
        figures = measure(trace)
    except OSError as error:
        options.error(f"--trace: {trace}: {error.strerror}")
    except replay.TraceError as error:
        options.error(f"--trace: {trace}: {error}")
    name = "core-compiled.json" if IS_COMPILED else "core.json"
    save(figures, RESULTS / name)


if __name__ == "__main__":
    main()
