"""Launches that only decode, as CUDA graphs: one for each rung of a ladder of batch sizes, captured before serving.

Knows no layer and no sampling wish: what a launch computes is the `Step` that it was given.

    token_ids positions slots lengths   static, of the ladder's size; rows that no sequence has: slot -1, length 0
    running sums of lengths             static likewise; for launches whose rows are chunks of one token
    block tables                        static, as wide as the longest sequence; only the columns in use are copied
"""

from __future__ import annotations

import logging
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from worker_service.core.batch import Batch
from worker_service.model.attention import LaunchInputs
from worker_service.model.staging import HostArray, Upload, packed_bytes, padded

PADDING_SLOT = -1
SMALL_RUNGS = (1, 2, 4, 8)
RUNG_STEP = 8
# Beyond it the weights' share of a launch is small, so a padding row costs little and rungs may lie further apart.
WIDE_FROM = 64
WIDE_STEP = 32

_log = logging.getLogger("worker_service")


class Step(NamedTuple):
    """One launch's results: the likeliest tokens int32 [rows] and the logits [rows, vocab_size]."""

    tokens: torch.Tensor
    logits: torch.Tensor


class GraphLimits(NamedTuple):
    """What the static buffers must hold; `num_padding` are rows that a launch of so many rows needs beyond them."""

    max_num_seqs: int
    max_model_len: int
    page_tokens: int
    num_groups: int
    num_padding: Callable[[int], int]
    one_phase: bool  # rows go through the attention of prompts, as chunks of one token


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    step: Step


def ladder(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture, the largest last."""
    narrow = range(2 * RUNG_STEP, WIDE_FROM + 1, RUNG_STEP)
    wide = range(WIDE_FROM + WIDE_STEP, max_num_seqs, WIDE_STEP)
    return (*(rung for rung in (*SMALL_RUNGS, *narrow, *wide) if rung < max_num_seqs), max_num_seqs)


class DecodeGraphs:
    """Captures `forward` once per rung; `replay` fills the static buffers and runs the smallest graph that fits."""

    def __init__(self, forward: Callable[[LaunchInputs], Step], limits: GraphLimits, device: torch.device) -> None:
        self._forward = forward
        self._limits = limits
        self._rungs = ladder(limits.max_num_seqs)
        self._size = limits.max_num_seqs + limits.num_padding(limits.max_num_seqs) + SMALL_RUNGS[-1]
        width = -(-limits.max_model_len // limits.page_tokens)
        self._tables = [
            torch.zeros((limits.max_num_seqs, width), dtype=torch.int32, device=device)
            for _ in range(limits.num_groups)
        ]
        room = [8 * self._size] * (5 + limits.num_groups) + [table.nbytes for table in self._tables]
        self._upload = Upload(device, packed_bytes(room))
        self._inputs = self._upload.send(self._fixed(_NOTHING._replace(slots=(array("q"),) * limits.num_groups)))
        self._captured: dict[int, Captured] = {}

    def capture(self) -> None:
        """All rungs, the largest first: the smaller ones then fit into its memory. Compiles what was never run."""
        start_s, free_bytes = time.monotonic(), torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        for rung in reversed(self._rungs):
            inputs = self._launch_inputs(rung)
            self._forward(inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step = self._forward(inputs)
            self._captured[rung] = Captured(graph, step)
        torch.cuda.synchronize()
        taken = {
            "rungs": len(self._rungs),
            "seconds": round(time.monotonic() - start_s, 2),
            "mib": (free_bytes - torch.cuda.mem_get_info()[0]) >> 20,
        }
        _log.info("decode graphs captured", extra=taken)

    def fits(self, batch: Batch) -> bool:
        """Whether the launch only decodes, samples every row and finds a rung."""
        rows = batch.num_seqs
        return 0 < rows <= self._rungs[-1] and batch.num_decode_seqs == rows == len(batch.sampled)

    def replay(self, batch: Batch) -> Step:
        """One copy to the device, one copy per group's tables there, one graph; results live until the next call."""
        rows = batch.num_seqs
        lengths = array("i", (end - start for start, end in pairwise(batch.cu_seqlens_k)))
        sums = (batch.cu_seqlens_q, batch.cu_seqlens_k)
        fixed = self._fixed(_Rows(batch.token_ids, batch.positions, lengths, *sums, batch.slot_mapping))
        tensors = self._upload.send([*fixed, *batch.block_tables])
        for table, width, sent in zip(self._tables, batch.table_widths, tensors[len(fixed) :], strict=True):
            table[:rows, :width].copy_(sent.view(rows, width))
        captured = self.captured(rows)
        captured.graph.replay()
        return Step(captured.step.tokens[:rows], captured.step.logits[:rows])

    def captured(self, num_seqs: int) -> Captured:
        """The graph that serves so many sequences."""
        return self._captured[self._rungs[bisect_left(self._rungs, num_seqs)]]

    def _fixed(self, rows: _Rows) -> list[HostArray]:
        """Of one size whatever the launch, so that the upload puts each where the graphs look for it."""
        cu_q, cu_k = (padded(sums, self._size + 1, sums[-1]) for sums in (rows.cu_seqlens_q, rows.cu_seqlens_k))
        plain = [padded(values, self._size, 0) for values in (rows.token_ids, rows.positions, rows.lengths)]
        return [*plain, cu_q, cu_k, *(padded(values, self._size, PADDING_SLOT) for values in rows.slots)]

    def _launch_inputs(self, rung: int) -> LaunchInputs:
        rows = rung + self._limits.num_padding(rung)
        token_ids, positions, lengths, cu_q, cu_k, *slots = self._inputs
        num_decode, num_prefill = (0, rung) if self._limits.one_phase else (rung, 0)
        return LaunchInputs(
            token_ids=token_ids[:rows],
            positions=positions[:rows],
            slot_mapping=[values[:rows] for values in slots],
            block_tables=[table[:rung] for table in self._tables],
            decode_seqlens_k=lengths[:num_decode],
            prefill_cu_q=cu_q[: num_prefill + 1],
            prefill_cu_k=cu_k[: num_prefill + 1],
            num_tokens=rung,
            num_decode=num_decode,
            max_seqlen_q=1,
            max_seqlen_k=self._limits.max_model_len,
        )


class _Rows(NamedTuple):
    """What the host knows of a launch's rows."""

    token_ids: array[int]
    positions: array[int]
    lengths: array[int]
    cu_seqlens_q: array[int]
    cu_seqlens_k: array[int]
    slots: tuple[array[int], ...]


_NOTHING = _Rows(array("i"), array("i"), array("i"), array("i", (0,)), array("i", (0,)), ())
