"""Times launches of a Llama-3-8B-shaped model on a CUDA device, in process: decode steps and prompts behind a prefix.

    python -m benchmarks.bench_llama_gpu [--invariance strict batch fast] [--kv-dtype fp8_e4m3] --out model.json

Each `invariance` gets a process of its own: cuBLAS reads its settings once. The floors that the times
are held against are measured in the same process. Nothing is timed before the captured launch gave the tokens of the
uncaptured one, and the cached prompt the tokens of the cold one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_timer import CEILING_BYTES, Timer, between_events_us, read_microseconds
from benchmarks.paged_model import PagedModel
from benchmarks.report import rounded, save
from benchmarks.serving.checkpoint import LLAMA_8B
from kernels.fp8 import E4M3
from kernels.graph_capture import graph_capture
from kernels.rotate_append_kv import RotatedQueries
from worker_service.config import KV_DTYPES
from worker_service.core.batch import Batch
from worker_service.core.runner_port import LaunchTokens
from worker_service.model.attention import PagedHeads
from worker_service.model.attention_specs import AttentionSpec
from worker_service.model.device import pick_page_dtype, prepare_process
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.kv_scales import NO_SCALES, KvScales
from worker_service.model.runner import RunnerLimits

KINDS = tuple(kind.value for kind in Invariance)
DEVICE = torch.device("cuda", 0)
CONTEXT = 4096
CASES = ("decode_1", "decode_16", "decode_64", "siblings", "long_prefix", "mixed")
SIBLINGS, SIBLING_TOKENS = 8, 512
MIXED_DECODE = 16
LONG_PREFIX, SHORT_PROMPT = 32_768, 64
NUM_PAGES = 64 * (CONTEXT // 16 + 2) + 2_100
FIELDS = {**LLAMA_8B, "max_position_embeddings": LONG_PREFIX + CONTEXT}
STEPS = 15

Figures = dict[str, float]


class Bench:
    """One model under one `invariance`, with pages of one dtype."""

    def __init__(self, invariance: Invariance, kv_dtype: torch.dtype) -> None:
        self.invariance = invariance
        self.timer = Timer()
        source = torch.ones(CEILING_BYTES // 4, device=DEVICE)
        self.read_bytes_per_us = CEILING_BYTES / read_microseconds(self.timer, source)
        del source
        limits = RunnerLimits(64, SIBLINGS * SIBLING_TOKENS, invariance, graphs=True)
        started = time.perf_counter()
        self.llama = PagedModel(FIELDS, NUM_PAGES, limits, DEVICE, kv_dtype=kv_dtype)
        one = torch.ones(1, device=DEVICE)
        self.scales = KvScales(one, one) if kv_dtype is E4M3 else NO_SCALES
        torch.cuda.synchronize()
        self.start_s = time.perf_counter() - started
        self.runner = self.llama.runner

    def wall_us(self, work: Callable[[], object], times: int = STEPS) -> float:
        """Median of what the caller waits; the first calls, which may compile, do not count."""
        for _ in range(2):
            work()
        samples = []
        for _ in range(times):
            started = time.perf_counter()
            work()
            samples.append((time.perf_counter() - started) * 1e6)
        return statistics.median(samples)

    def device_us(self, work: Callable[[], object], times: int = STEPS) -> float:
        """Median of replays of a captured call, between events; each reads too much for the cache to matter."""
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            work()
            with graph_capture(graph):
                work()
        return between_events_us(graph.replay, times)

    def decode(self, size: int) -> Figures:
        """One step of `size` sequences; share: the time that their bytes need at the read ceiling, over the time."""
        self.llama.free_pages()
        sequences = [self.llama.sequence(CONTEXT + 1) for _ in range(size)]
        batch = self.llama.batch(sequences, CONTEXT)
        self._check_replay(batch)
        graphs = self.runner._graphs
        bucket = graphs.bucket_for(batch) if graphs else None
        assert graphs and bucket
        device = between_events_us(graphs.graph(bucket).replay, STEPS)
        limit = (self.llama.weight_bytes() + self.llama.kv_bytes(size * (CONTEXT + 1))) / self.read_bytes_per_us
        wall = self.wall_us(lambda: self.runner.run(batch))
        return {"device_us": device, "run_us": wall, "limit_us": limit, "share": limit / device}

    def _check_replay(self, batch: Batch) -> None:
        graphs, self.runner._graphs = self.runner._graphs, None
        plain = self.runner.run(batch)
        self.runner._graphs = graphs
        assert self.runner.run(batch).token_ids == plain.token_ids, "a replay differs from the launch"

    def siblings(self) -> Figures:
        """Prompts behind cached prefixes, against their own GEMMs and attention alone, and against the cold run."""
        self.llama.free_pages()
        sequences = [self.llama.sequence(CONTEXT + SIBLING_TOKENS) for _ in range(SIBLINGS)]
        cold_batches = [self.llama.batch([entry], 0) for entry in sequences]
        warm_batch = self.llama.batch(sequences, CONTEXT)
        cold_results = [self.runner.run(batch) for batch in cold_batches]
        warm_result = self.runner.run(warm_batch)
        self._check_same(cold_results, warm_result)
        cold = self.wall_us(lambda: [self.runner.run(batch) for batch in cold_batches], 2)
        warm = self.wall_us(lambda: self.runner.run(warm_batch))
        gemms = self.gemm_floor(SIBLINGS * SIBLING_TOKENS, SIBLINGS)
        attention = self.attention_us(warm_batch)
        floor = gemms + attention
        return {
            "ttft_us": warm,
            "gemm_us": gemms,
            "attention_us": attention,
            "over_floor": warm / floor,
            "cold_us": cold,
            "over_cold": warm / cold,
        }

    def _check_same(self, cold: Iterable[LaunchTokens], warm: LaunchTokens) -> None:
        tokens = tuple(token for result in cold for token in result.token_ids)
        same = sum(one == other for one, other in zip(tokens, warm.token_ids, strict=True))
        assert same == len(tokens) or self.runner_is_fast, f"{same} of {len(tokens)} cached prompts gave the cold token"

    @property
    def runner_is_fast(self) -> bool:
        return self.invariance is Invariance.FAST

    def long_prefix(self) -> Figures:
        """A short prompt behind a long prefix, against the short prompt alone and the attention over that prefix."""
        self.llama.free_pages()
        behind = self.llama.batch([self.llama.sequence(LONG_PREFIX + SHORT_PROMPT)], LONG_PREFIX)
        alone = self.llama.batch([self.llama.sequence(SHORT_PROMPT)], 0)
        warm, short = (self.wall_us(lambda batch=batch: self.runner.run(batch)) for batch in (behind, alone))
        attention = self.attention_us(behind) - self.attention_us(alone)
        return {
            "ttft_us": warm,
            "short_us": short,
            "attention_us": attention,
            "over_floor": warm / (short + attention),
        }

    def mixed(self) -> Figures:
        """A short prompt behind a prefix, beside sequences that decode, against one launch for each."""
        self.llama.free_pages()
        decoding = [self.llama.sequence(CONTEXT + 1) for _ in range(MIXED_DECODE)]
        prompt = self.llama.sequence(CONTEXT + SHORT_PROMPT)
        batches = (self.llama.batch(decoding, CONTEXT), self.llama.batch([prompt], CONTEXT))
        together = self.llama.batch([*decoding, prompt], CONTEXT)
        mixed, *apart = (self.wall_us(lambda batch=batch: self.runner.run(batch)) for batch in (together, *batches))
        return {"ttft_us": mixed, "decode_us": apart[0], "prompt_us": apart[1], "over_both": mixed / sum(apart)}

    def gemm_floor(self, num_rows: int, num_logits: int) -> float:
        """The launch's matrix products alone, by torch; one pass over all layers leaves nothing in the cache."""
        linears = self.llama.model.linears()
        inputs = {
            size: torch.randn(num_rows, size, device=DEVICE, dtype=torch.bfloat16)
            for size in {linear.weight.shape[1] for linear in linears}
        }

        def products() -> None:
            for linear in linears[:-1]:
                torch.mm(inputs[linear.weight.shape[1]], linear.weight.t())
            torch.mm(inputs[linears[-1].weight.shape[1]][:num_logits], linears[-1].weight.t())

        return self.device_us(products, 5)

    def attention_us(self, batch: Batch) -> float:
        """The launch's attention alone, in all layers, over its own pages and with random queries."""
        spec = self.llama.config
        mixer = spec.layers[0].mixer
        assert isinstance(mixer, AttentionSpec)
        with torch.inference_mode():
            inputs = self.runner._staged(batch).inputs
            attention = PagedHeads(self.llama.pages, inputs, self.runner._plans.heads)
            rows, others = inputs.token_ids.shape[0], inputs.token_ids.shape[0] - inputs.num_decode
            group = mixer.num_heads // mixer.num_kv_heads
            packed = (mixer.num_kv_heads, others, group, mixer.head_dim)
            queries = RotatedQueries(
                torch.randn(rows, mixer.num_heads, mixer.head_dim, device=DEVICE, dtype=torch.bfloat16),
                torch.randn(packed, device=DEVICE, dtype=torch.bfloat16),
            )
            layers = range(len(spec.layers))
            return self.device_us(lambda: [attention.attended(at, queries, scales=self.scales) for at in layers], 5)


def measure(invariance: Invariance, kv_dtype: str, cases: Sequence[str]) -> dict[str, Any]:
    prepare_process(DEVICE, 0, stable_gemms=invariance is not Invariance.FAST)
    bench = Bench(invariance, pick_page_dtype("kv_dtype", kv_dtype, DEVICE) or torch.bfloat16)
    report: dict[str, Any] = {"start_s": bench.start_s, "read_gb_per_s": bench.read_bytes_per_us * 1e-3}
    for name in cases:
        report[name] = bench.decode(int(name.removeprefix("decode_"))) if "decode" in name else getattr(bench, name)()
        print(json.dumps({name: rounded(report[name])}), file=sys.stderr, flush=True)
    report["tiled"] = sorted(map(str, bench.runner._gemm.tiled))
    return report


def cost(batch: dict[str, Any], fast: dict[str, Any]) -> Figures:
    """Returns how much longer a launch takes under `batch`."""
    times = {
        name: next(unit for unit in ("device_us", "ttft_us") if unit in batch[name]) for name in CASES if name in batch
    }
    return {name: batch[name][unit] / fast[name][unit] - 1 for name, unit in times.items()}


def in_own_process(invariance: str, kv_dtype: str, cases: Sequence[str]) -> dict[str, Any]:
    settings = ["--only", invariance, "--kv-dtype", kv_dtype]
    command = [sys.executable, "-m", "benchmarks.bench_llama_gpu", *settings, "--cases", *cases]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--invariance", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="of the pages; auto: bf16")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_llama_gpu needs a CUDA device")
    if arguments.only:
        print(json.dumps(rounded(measure(Invariance(arguments.only), arguments.kv_dtype, arguments.cases))))
        return
    if arguments.out is None:
        parser.error("--out: where the figures are to go")
    from benchmarks.bench_gpu import about_device

    report: dict[str, Any] = {
        **about_device(),
        "kv_dtype": arguments.kv_dtype,
        **{kind: in_own_process(kind, arguments.kv_dtype, arguments.cases) for kind in arguments.invariance},
    }
    if {"batch", "fast"} <= set(report):
        report["cost_of_batch"] = rounded(cost(report["batch"], report["fast"]))
    save(report, arguments.out)


if __name__ == "__main__":
    main()
