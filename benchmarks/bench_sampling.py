"""What sampling adds to a decode launch of 64 sequences of a Llama-3-8B-shaped model, on a CUDA device, in process.

    python -m benchmarks.bench_sampling [--layers 32] --out sampling.json

Device time is that of the captured launch, and of what follows it for log-probabilities; host time that of `submit`.
"""

from __future__ import annotations

import statistics
import sys
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_gpu import about_device
from benchmarks.gpu_timer import between_events_us
from benchmarks.paged_model import PagedModel
from benchmarks.report import parser, save
from benchmarks.serving.checkpoint import LLAMA_8B
from worker_service.core.batch import Batch, CountedRow, SampledRow
from worker_service.core.sampling_params import SamplingParams
from worker_service.model.device import prepare_process
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.results import joined
from worker_service.model.runner import RunnerLimits

DEVICE = torch.device("cuda", 0)
SEQS, CONTEXT, HISTORY = 64, 512, 32_768
NUM_PAGES = SEQS * (CONTEXT // 16 + 1) + 1
STEPS = 25
# By name: parameters, and how many of the rows have them; the others are greedy.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({}, 0),
    "temperature": ({"temperature": 1.0}, SEQS),
    "one_top_p": ({"temperature": 1.0, "top_p": 0.9}, 1),
    "top_p": ({"temperature": 1.0, "top_p": 0.9}, SEQS),
    "one_top_k_and_top_p": ({"temperature": 0.7, "top_k": 20, "top_p": 0.8}, 1),
    "top_k_and_top_p": ({"temperature": 0.7, "top_k": 20, "top_p": 0.8}, SEQS),
    "min_p": ({"temperature": 1.0, "min_p": 0.05}, SEQS),
    "penalties": ({"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}, SEQS),
    "penalties_and_top_p": ({"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1}, SEQS),
    "logprobs_5": ({"logprobs": 5}, SEQS),
}


class Bench:
    def __init__(self, num_layers: int) -> None:
        limits = RunnerLimits(SEQS, SEQS, Invariance.BATCH, graphs=True)
        self.llama = PagedModel({**LLAMA_8B, "num_hidden_layers": num_layers}, NUM_PAGES, limits, DEVICE)
        self.runner = self.llama.runner
        self.greedy = self.llama.batch([self.llama.sequence(CONTEXT + 1) for _ in range(SEQS)], CONTEXT)
        graphs = self.runner._graphs
        bucket = graphs and graphs.bucket_for(self.greedy)
        assert graphs and bucket
        self.captured = graphs._captured[bucket]

    def batch(self, name: str, history: array[int] | None = None) -> Batch:
        params, count = CASES[name]
        sampled = list(self.greedy.sampled)
        for at in range(count):
            sampling = SamplingParams(**params, seed=at)
            slot = CountedRow(at, history, CONTEXT) if sampling.has_penalties else None
            sampled[at] = SampledRow(at, sampling, CONTEXT + 1, slot)
        return replace(self.greedy, sampled=tuple(sampled))

    def figures(self, name: str) -> dict[str, float]:
        batch, num_logprobs = self.batch(name), CASES[name][0].get("logprobs", -1)
        self.runner.run(batch)
        output = self.captured.output

        def launch() -> None:
            self.captured.graph.replay()
            joined(output.tokens, output.logits, num_logprobs, self.llama.model.backend)

        with torch.inference_mode():
            device = between_events_us(launch, STEPS)
        return {"device_us": device, "submit_us": self.submit_us(batch)}

    def submit_us(self, batch: Batch) -> float:
        samples = []
        for _ in range(STEPS):
            started = time.perf_counter()
            running = self.runner.submit(batch)
            samples.append((time.perf_counter() - started) * 1e6)
            running.wait()
        return statistics.median(samples)

    def recount_us(self) -> float:
        """Once in the life of each sequence: the host time of counting HISTORY tokens of all of them."""
        return self.submit_us(self.batch("penalties", array("i", range(HISTORY))))


def measure(num_layers: int) -> dict[str, Any]:
    prepare_process(DEVICE, 0, stable_gemms=True)
    bench = Bench(num_layers)
    report: dict[str, Any] = {name: bench.figures(name) for name in CASES}
    launch = report["greedy"]["device_us"]
    for figures in report.values():
        figures["added_us"] = figures["device_us"] - launch
        figures["share"] = figures["added_us"] / launch
    report["recount_us"] = bench.recount_us()
    return report


def main() -> None:
    options = parser(__doc__, layers=32)
    options.add_argument("--out", type=Path, required=True)
    told = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_sampling needs a CUDA device")
    save({**about_device(), "layers": told.layers, **measure(told.layers)}, told.out)


if __name__ == "__main__":
    main()
