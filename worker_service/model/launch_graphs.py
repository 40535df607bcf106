"""Launches as CUDA graphs, captured before serving: decode steps by batch size, small prompts by number of tokens.

Knows no layer and no sampling wish: what a launch computes is the `Forward` that it was given.

    token ids, positions, slots    static, of one size whatever the launch; rows that no sequence has: slot -1
    lengths and their sums         static; sequences that are not there have no tokens and no keys
    block tables                   static, as wide as the longest sequence; only the columns in use are copied
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from worker_service.core.batch import Batch
from worker_service.model.attention import LaunchInputs
from worker_service.model.staging import HostArray, Upload, packed_bytes, padded

PADDING_SLOT = -1
SMALL_BATCHES = (1, 2, 4, 8)
BATCH_STEP = 8
# Beyond it the weights' share of a launch is small, so a padding row costs little and rungs may lie further apart.
WIDE_FROM = 64
WIDE_STEP = 32
# Prompts beyond the last keep the device busy for longer than their launch takes the host.
PROMPT_TOKENS = (16, 64, 128, 256, 512)
# Rows that may sample in a captured prompt launch; the head reads its weights once for that many.
PROMPT_SAMPLES = 8

_log = logging.getLogger("worker_service")


class Step(NamedTuple):
    """One launch's results: the likeliest tokens int32 [rows] and the logits [rows, vocab_size]."""

    tokens: torch.Tensor
    logits: torch.Tensor


# Inputs, and which rows to give logits of: None for all.
Forward = Callable[[LaunchInputs, torch.Tensor | None], Step]


class GraphLimits(NamedTuple):
    """What the static buffers must hold."""

    max_num_seqs: int
    max_tokens: int
    max_model_len: int
    page_tokens: int
    num_groups: int
    least_rows: int
    one_phase: bool  # decode rows go through the attention of prompts, as chunks of one token


class Rung(NamedTuple):
    """The shape of one graph."""

    num_tokens: int
    num_seqs: int
    is_decode: bool


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    step: Step


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of decoding sequences to capture, the largest last."""
    narrow = range(2 * BATCH_STEP, WIDE_FROM + 1, BATCH_STEP)
    wide = range(WIDE_FROM + WIDE_STEP, max_num_seqs, WIDE_STEP)
    return (*(size for size in (*SMALL_BATCHES, *narrow, *wide) if size < max_num_seqs), max_num_seqs)


def rungs(limits: GraphLimits) -> tuple[Rung, ...]:
    """Every graph's shape; of those that fit a launch the first one is the smallest."""
    decode = (Rung(size, size, True) for size in batch_sizes(limits.max_num_seqs))
    prompts = (Rung(size, limits.max_num_seqs, False) for size in PROMPT_TOKENS if size <= limits.max_tokens)
    return (*decode, *prompts)


class LaunchGraphs:
    """Captures `forward` once per rung; `replay` fills the static buffers and runs the smallest graph that fits."""

    def __init__(self, forward: Forward, limits: GraphLimits, device: torch.device) -> None:
        self._forward = forward
        self._limits = limits
        self._rungs = rungs(limits)
        self._num_tokens = max(*(rung.num_tokens for rung in self._rungs), limits.least_rows)
        width = -(-limits.max_model_len // limits.page_tokens)
        self._tables = [
            torch.zeros((limits.max_num_seqs, width), dtype=torch.int32, device=device)
            for _ in range(limits.num_groups)
        ]
        nothing = self._fixed(_no_rows(limits.num_groups))
        sizes = [len(values) * values.itemsize for values in nothing] + [table.nbytes for table in self._tables]
        self._upload = Upload(device, packed_bytes(sizes))
        self._inputs = self._upload.send(nothing)
        self._captured: dict[Rung, Captured] = {}

    def capture(self) -> None:
        """All rungs, the largest first: the smaller ones then fit into its memory. Compiles what was never run."""
        start_s, free_bytes = time.monotonic(), torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        for rung in sorted(self._rungs, reverse=True):
            inputs, logits_rows = self._launch_inputs(rung)
            self._forward(inputs, logits_rows)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step = self._forward(inputs, logits_rows)
            self._captured[rung] = Captured(graph, step)
        torch.cuda.synchronize()
        taken = {
            "graphs": len(self._rungs),
            "seconds": round(time.monotonic() - start_s, 2),
            "mib": (free_bytes - torch.cuda.mem_get_info()[0]) >> 20,
        }
        _log.info("launches captured", extra=taken)

    def rung_for(self, batch: Batch) -> Rung | None:
        """The smallest graph that can stand in for the launch."""
        samples, is_decode = len(batch.sampled), batch.num_decode_seqs == batch.num_seqs == len(batch.sampled)
        if is_decode and 0 < batch.num_seqs <= self._limits.max_num_seqs:
            return next(rung for rung in self._rungs if rung.num_seqs >= batch.num_seqs)
        in_one_phase = self._limits.one_phase or batch.num_decode_seqs == 0
        if not in_one_phase or samples > PROMPT_SAMPLES or not 0 < batch.num_seqs <= self._limits.max_num_seqs:
            return None
        prompts = (rung for rung in self._rungs if not rung.is_decode and rung.num_tokens >= batch.num_tokens)
        return next(prompts, None)

    def replay(self, rung: Rung, batch: Batch) -> Step:
        """One copy to the device, one copy per group's tables there, one graph; results live until the next call."""
        lengths = array("i", (end - start for start, end in pairwise(batch.cu_seqlens_k)))
        fixed = self._fixed(
            _Rows(
                batch.token_ids,
                batch.positions,
                lengths,
                batch.logits_rows,
                batch.cu_seqlens_q,
                batch.cu_seqlens_k,
                batch.slot_mapping,
            )
        )
        tensors = self._upload.send([*fixed, *batch.block_tables])
        for table, width, sent in zip(self._tables, batch.table_widths, tensors[len(fixed) :], strict=True):
            table[: batch.num_seqs, :width].copy_(sent.view(batch.num_seqs, width))
        graph, step = self._captured[rung]
        graph.replay()
        samples = len(batch.sampled)
        return Step(step.tokens[:samples], step.logits[:samples])

    def graph(self, rung: Rung) -> torch.cuda.CUDAGraph:
        return self._captured[rung].graph

    def _fixed(self, rows: _Rows) -> list[HostArray]:
        """Of one size whatever the launch, so that the upload puts each where the graphs look for it."""
        tokens, seqs = self._num_tokens, self._limits.max_num_seqs
        cu_q, cu_k = (padded(sums, seqs + 1, sums[-1]) for sums in (rows.cu_seqlens_q, rows.cu_seqlens_k))
        return [
            padded(rows.token_ids, tokens, 0),
            padded(rows.positions, tokens, 0),
            padded(rows.lengths, seqs, 0),
            padded(rows.logits_rows, max(seqs, PROMPT_SAMPLES), 0),
            cu_q,
            cu_k,
            *(padded(slots, tokens, PADDING_SLOT) for slots in rows.slots),
        ]

    def _launch_inputs(self, rung: Rung) -> tuple[LaunchInputs, torch.Tensor | None]:
        rows = max(rung.num_tokens, self._limits.least_rows)
        token_ids, positions, lengths, logits_rows, cu_q, cu_k, *slots = self._inputs
        splits_off = rung.is_decode and not self._limits.one_phase
        num_decode, num_others = (rung.num_seqs, 0) if splits_off else (0, rung.num_seqs)
        inputs = LaunchInputs(
            token_ids=token_ids[:rows],
            positions=positions[:rows],
            slot_mapping=[values[:rows] for values in slots],
            block_tables=[table[: rung.num_seqs] for table in self._tables],
            decode_seqlens_k=lengths[:num_decode],
            prefill_cu_q=cu_q[: num_others + 1],
            prefill_cu_k=cu_k[: num_others + 1],
            num_tokens=rung.num_tokens,
            num_decode=num_decode,
            max_seqlen_q=1 if rung.is_decode else rung.num_tokens,
            max_seqlen_k=self._limits.max_model_len,
        )
        return inputs, None if rung.is_decode else logits_rows[:PROMPT_SAMPLES]


class _Rows(NamedTuple):
    """What the host knows of a launch, in the order of the upload."""

    token_ids: array[int]
    positions: array[int]
    lengths: array[int]
    logits_rows: array[int]
    cu_seqlens_q: array[int]
    cu_seqlens_k: array[int]
    slots: tuple[array[int], ...]


def _no_rows(num_groups: int) -> _Rows:
    none, sums = array("i"), array("i", (0,))
    return _Rows(none, none, none, none, sums, sums, (array("q"),) * num_groups)
