"""Times work on a CUDA device, and the device's own ceilings to hold the times against.

One sample is a replay of a captured graph with the L2 cache flushed before it; a time is the median of them. What is
compared is sampled in turns, every second round in reverse: clocks and power change within a run.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from benchmarks.gpu_reader import readers
from benchmarks.measurement import Work
from kernels.graph_capture import graph_capture

T = TypeVar("T")

WARM_UPS = 3
SAMPLES = 40
FLUSH_BYTES = 256 << 20
# Slower than was ever seen.
CLEARED_BYTES_PER_SECOND = 100e9
CEILING_BYTES = 4 << 30
GEMM_SIZE = 8192


class Timer:
    """Owns the buffer that flushes the cache."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def microseconds(self, work: Work) -> float:
        """The median time of one call of `work`, which must not wait for the device."""
        graph = _captured(work)
        return statistics.median([self._sample(graph) for _ in range(SAMPLES)])

    def side_by_side(self, works: Sequence[Work]) -> list[float | str]:
        """The median time of each work's calls, or the complaint of one that cannot run."""
        return in_turns(works, _captured, self._sample, SAMPLES)

    def _sample(self, graph: torch.cuda.CUDAGraph) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) * 1e3


def in_turns(
    works: Sequence[Work], capture: Callable[[Work], T], sample: Callable[[T], float], rounds: int
) -> list[float | str]:
    """Returns the median of each work's samples, taken in turns, or the complaint of one that could not be captured."""
    captured: dict[int, T] = {}
    result: list[float | str] = []
    for number, work in enumerate(works):
        try:
            captured[number] = capture(work)
            result.append("")
        except (RuntimeError, ImportError, AttributeError, TypeError) as failure:
            result.append(str(failure).partition("\n")[0])
    samples: dict[int, list[float]] = {number: [] for number in captured}
    for turn in range(rounds):
        for number in list(captured)[:: -1 if turn % 2 else 1]:
            samples[number].append(sample(captured[number]))
    for number, taken in samples.items():
        result[number] = statistics.median(taken)
    return result


def _captured(work: Work) -> torch.cuda.CUDAGraph:
    """One call of `work` as a graph, warmed up."""
    for _ in range(WARM_UPS):
        work()
    torch.cuda.synchronize()
    _give_back()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        work()
    graph.replay()
    return graph


def between_events_us(work: Work, times: int) -> float:
    """The median of `times` calls on the device, of work that is one graph or waits for nothing; no cache is flushed.

    The first call, which may compile, does not count.
    """
    work()
    samples = []
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        samples.append(float(start.elapsed_time(stop)) * 1e3)
    return statistics.median(samples)


def _give_back() -> None:
    """Frees what no tensor holds, as a capture would, and waits until the device is done with it.

    Memory that was given back takes bandwidth from what runs meanwhile: 6 GB of it for about 20 ms.
    """
    gc.collect()
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    time.sleep((held - torch.cuda.memory_reserved()) / CLEARED_BYTES_PER_SECOND)


def ceilings(timer: Timer) -> dict[str, float]:
    """What this card can do at best: torch's copy and product, and the fastest of some plain readers."""
    small = torch.empty(1, device="cuda")
    copy, read = _memory(timer)
    return {
        "copy_gb_per_s": round(2e-3 * CEILING_BYTES / copy, 1),
        "read_gb_per_s": round(1e-3 * CEILING_BYTES / read, 1),
        "gemm_bf16_tflops": round(2e-6 * GEMM_SIZE**3 / _gemm(timer), 1),
        "empty_launch_us": round(timer.microseconds(small.zero_), 2),
    }


def _memory(timer: Timer) -> tuple[float, float]:
    """Microseconds to copy, and to read, CEILING_BYTES."""
    source = torch.ones(CEILING_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    # A captured copy goes to the copy engine, which a kernel outruns.
    copies = (lambda: target.copy_(source), lambda: torch.mul(source, 2.0, out=target))
    return min(map(timer.microseconds, copies)), read_microseconds(timer, source)


def read_microseconds(timer: Timer, source: torch.Tensor) -> float:
    """The least time in which anything here reads `source`: what memory-bound figures are held against."""
    card = torch.cuda.get_device_properties(source.device)
    return min(map(timer.microseconds, (source.sum, *readers(source, card.multi_processor_count))))


def _gemm(timer: Timer) -> float:
    """Microseconds of one large product in bf16."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return timer.microseconds(lambda: a @ b)
