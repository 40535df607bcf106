"""Launches as CUDA graphs, captured before serving: decode steps, prompts, and prompts beside decode rows.

What a launch computes is the `Forward` that the constructor is given.

    parameters of sampling         static: of decode rows, of prompts that sample; padding rows are greedy
    token ids, positions, slots    static: the bucket's decode rows, then its prompts' tokens; padding rows: slot -1
    lengths and their sums         static: of decode rows, of prompts; sequences that are not there have no keys
    block tables                   static, as wide as the longest sequence; only the columns in use are copied
    slots of states                static: of decode rows, of prompts, of snapshots; padding rows have none
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from kernels.graph_capture import graph_capture
from kernels.sample_tokens import SamplingTensors
from worker_service.core.batch import Batch, SampledRow
from worker_service.model.last_tokens import LastTokens
from worker_service.model.launch_buckets import PROMPT_SAMPLES, Bucket, GraphLimits, buckets
from worker_service.model.launch_inputs import LaunchInputs, PromptLens
from worker_service.model.sampling_arrays import NUM_ARRAYS, sampling_arrays
from worker_service.model.staging import HostArray, Upload, packed_bytes, padded
from worker_service.model.state_inputs import RowPlaces, padding_arrays, state_arrays, state_inputs

PADDING_SLOT = -1
# The place of this array in the upload.
_FROM_PREVIOUS = 0

_log = logging.getLogger("worker_service")


class SampledInputs(NamedTuple):
    """How to sample, and which of the launch's tokens each sampled row continues from: int32 [sampled rows]."""

    params: SamplingTensors
    rows: torch.Tensor


class GraphOutput(NamedTuple):
    """One launch's results: the sampled tokens int32 [rows] and the logits [rows, vocab_size]."""

    tokens: torch.Tensor
    logits: torch.Tensor


# Inputs, which rows to give logits of (None: all), and how to sample the first of these.
Forward = Callable[[LaunchInputs, torch.Tensor | None, SampledInputs], GraphOutput]


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    output: GraphOutput


class LaunchGraphs:
    """Captures `forward` once per bucket; `replay` fills the static buffers and runs the smallest graph that fits."""

    def __init__(self, forward: Forward, last: LastTokens, limits: GraphLimits, device: torch.device) -> None:
        self._forward = forward
        self._last = last
        self._limits = limits
        self._buckets = buckets(limits)
        self._num_rows = max(*(bucket.num_rows for bucket in self._buckets), limits.least_rows)
        width = -(-limits.max_model_len // limits.page_tokens)
        # Of decode rows and of as many prompts behind them.
        self._tables = [
            torch.zeros((2 * limits.max_num_seqs, width), dtype=torch.int32, device=device)
            for _ in range(limits.num_groups)
        ]
        nothing = [
            *self._fixed(_no_rows(limits.num_groups), 0, 0),
            *padding_arrays(sum(limits.has_states), self._places(0, 0)),
        ]
        sizes = [len(values) * values.itemsize for values in nothing] + [table.nbytes for table in self._tables]
        self._upload = Upload(device, packed_bytes(sizes))
        self._inputs = self._upload.send(nothing)
        self._captured: dict[Bucket, Captured] = {}

    def capture(self) -> None:
        """All buckets, the largest first: the smaller ones then fit into its memory. Compiles what was never run."""
        start_s, free_bytes = time.monotonic(), torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        for bucket in reversed(self._buckets):
            self._run(bucket)
            graph = torch.cuda.CUDAGraph()
            with graph_capture(graph, pool=pool, capture_error_mode="thread_local"):
                output = self._run(bucket)
            self._captured[bucket] = Captured(graph, output)
            # The first replay brings the graph to the device, for which no client should wait: 0.6 ms for 300 kernels.
            graph.replay()
        torch.cuda.synchronize()
        taken = {
            "graphs": len(self._buckets),
            "seconds": round(time.monotonic() - start_s, 2),
            "mib": (free_bytes - torch.cuda.mem_get_info()[0]) >> 20,
        }
        _log.info("launches captured", extra=taken)

    def _run(self, bucket: Bucket) -> GraphOutput:
        inputs, logits_rows, sampled = self._launch_inputs(bucket)
        from_previous = self._inputs[_FROM_PREVIOUS]
        self._last.fill_in(inputs.token_ids, from_previous[: inputs.token_ids.shape[0]])
        return self._forward(inputs, logits_rows, sampled)

    def bucket_for(self, batch: Batch) -> Bucket | None:
        """Returns the smallest bucket that holds the launch; None when none does."""
        num_decode = self._num_decode(batch)
        # Captured launches copy no states.
        if not batch.num_seqs or (num_decode and batch.has_decode_leaves):
            return None
        size = self._limits.size_of(batch, num_decode)
        return next((bucket for bucket in self._buckets if bucket.holds(size)), None)

    def replay(self, bucket: Bucket, batch: Batch) -> GraphOutput:
        """One copy to the device, one or two per group's tables there, one graph; results live until the next call."""
        self._fill(bucket, batch)
        graph, output = self._captured[bucket]
        graph.replay()
        samples = len(batch.sampled)
        return GraphOutput(output.tokens[:samples], output.logits[:samples])

    def _fill(self, bucket: Bucket, batch: Batch) -> None:
        num_decode = self._num_decode(batch)
        fixed = self._fixed(_rows_of(batch, num_decode), num_decode, bucket.num_decode)
        fixed += state_arrays(batch, self._places(num_decode, bucket.num_decode))
        # The graphs have the tensors of what is fixed.
        sent_tables = self._upload.send([*fixed, *batch.block_tables], slice(len(fixed), None))
        for table, width, sent in zip(self._tables, batch.table_widths, sent_tables, strict=True):
            _place(table[:, :width], sent.view(batch.num_seqs, width), num_decode, bucket.num_decode)

    def graph(self, bucket: Bucket) -> torch.cuda.CUDAGraph:
        return self._captured[bucket].graph

    def _num_decode(self, batch: Batch) -> int:
        return 0 if self._limits.one_phase else batch.num_decode_seqs

    def _fixed(self, rows: _Rows, num_decode: int, decode_rows: int) -> list[HostArray]:
        """Arrays of the same sizes for every launch, so that the upload puts each where the graphs read it.

        Prompts begin behind `decode_rows` rows, of which the launch fills the first num_decode.
        """
        size, seqs = self._num_rows, self._limits.max_num_seqs
        cu_q, cu_k = (padded(sums, seqs + 1, sums[-1]) for sums in (rows.cu_seqlens_q, rows.cu_seqlens_k))
        shift = decode_rows - num_decode
        size_sampled = seqs + PROMPT_SAMPLES
        logits_rows = array("i", (row if row < num_decode else row + shift for row in rows.logits_rows))

        def laid_out(values: array[int], value: int) -> array[int]:
            return padded(padded(values[:num_decode], decode_rows, value) + values[num_decode:], size, value)

        return [
            padded(rows.from_previous, seqs, -1),
            laid_out(rows.token_ids, 0),
            laid_out(rows.positions, 0),
            padded(rows.lengths, seqs, 0),
            padded(logits_rows, size_sampled, 0),
            cu_q,
            cu_k,
            *sampling_arrays(rows.sampled, size_sampled),
            *(laid_out(slots, PADDING_SLOT) for slots in rows.slots),
        ]

    def _launch_inputs(self, bucket: Bucket) -> tuple[LaunchInputs, torch.Tensor | None, SampledInputs]:
        rows = max(bucket.num_rows, self._limits.least_rows)
        _, token_ids, positions, lengths, logits_rows, cu_q, cu_k, *rest = self._inputs
        params, slots = rest[:NUM_ARRAYS], rest[NUM_ARRAYS : NUM_ARRAYS + self._limits.num_groups]
        states = state_inputs(self._limits.has_states, rest[NUM_ARRAYS + self._limits.num_groups :])
        num_sampled = bucket.num_logits or bucket.num_rows
        sampled = SampledInputs(
            SamplingTensors(*(values[:num_sampled] for values in params)), logits_rows[:num_sampled]
        )
        inputs = LaunchInputs(
            token_ids=token_ids[:rows],
            positions=positions[:rows],
            slot_mapping=[values[:rows] for values in slots],
            block_tables=[table[: bucket.num_decode + bucket.num_prompts] for table in self._tables],
            decode_seqlens_k=lengths[: bucket.num_decode],
            prefill_cu_q=cu_q[: bucket.num_prompts + 1],
            prefill_cu_k=cu_k[: bucket.num_prompts + 1],
            num_decode=bucket.num_decode,
            max_seqlen_q=bucket.prompt_tokens,
            max_seqlen_k=self._limits.max_model_len,
            max_prompt_keys=bucket.prompt_keys,
            states=states
            and states.part(
                bucket.num_decode + bucket.num_prompts,
                self._limits.num_leaves(bucket.num_decode, bucket.prompt_tokens, bucket.num_prompts),
            ),
        )
        return inputs, logits_rows[: bucket.num_logits] if bucket.num_logits else None, sampled

    def _places(self, num_decode: int, decode_rows: int) -> RowPlaces:
        limits = self._limits
        num_leaves = limits.num_leaves(limits.max_num_seqs, limits.max_tokens, limits.max_num_seqs)
        return RowPlaces(num_decode, decode_rows, 2 * limits.max_num_seqs, num_leaves)


class _Rows(NamedTuple):
    """What the host knows of a launch, in the order of the upload. Sums are of prompts alone, from 0 on."""

    from_previous: array[int]
    token_ids: array[int]
    positions: array[int]
    lengths: array[int]
    logits_rows: array[int]
    cu_seqlens_q: array[int]
    cu_seqlens_k: array[int]
    sampled: tuple[SampledRow, ...]
    slots: tuple[array[int], ...]


def _no_rows(num_groups: int) -> _Rows:
    none, sums = array("i"), array("i", (0,))
    return _Rows(none, none, none, none, none, sums, sums, (), (array("q"),) * num_groups)


def _rows_of(batch: Batch, num_decode: int) -> _Rows:
    lengths, cu_q, cu_k = split_lengths(batch, num_decode)
    return _Rows(
        batch.from_previous,
        batch.token_ids,
        batch.positions,
        lengths,
        batch.logits_rows,
        cu_q,
        cu_k,
        batch.sampled,
        batch.slot_mapping,
    )


def _place(table: torch.Tensor, sent: torch.Tensor, num_decode: int, decode_rows: int) -> None:
    """Rows of decoding sequences to the front, those of prompts behind the bucket's decode rows."""
    if num_decode:
        table[:num_decode].copy_(sent[:num_decode])
    if num_decode < sent.shape[0]:
        table[decode_rows : decode_rows + sent.shape[0] - num_decode].copy_(sent[num_decode:])


def prompt_lens(batch: Batch, num_decode: int) -> PromptLens:
    """New and cached tokens of each sequence that is not among the decode rows."""
    new = tuple(end - start for start, end in pairwise(batch.cu_seqlens_q[num_decode:]))
    ends = (end - start for start, end in pairwise(batch.cu_seqlens_k[num_decode:]))
    return PromptLens(new, tuple(end - count for end, count in zip(ends, new, strict=True)))


def split_lengths(batch: Batch, num_decode: int) -> tuple[array[int], array[int], array[int]]:
    """Key lengths of the decode rows; running sums of the others, from 0 anew."""
    cu_q, cu_k = batch.cu_seqlens_q, batch.cu_seqlens_k
    return (
        array("i", (end - start for start, end in pairwise(cu_k[: num_decode + 1]))),
        array("i", (end - cu_q[num_decode] for end in cu_q[num_decode:])),
        array("i", (end - cu_k[num_decode] for end in cu_k[num_decode:])),
    )
