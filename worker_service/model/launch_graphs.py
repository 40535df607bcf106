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
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.graph_capture import graph_capture
from kernels.sample_tokens import SamplingTensors
from worker_service.core.batch import Batch
from worker_service.model.last_tokens import LastTokens
from worker_service.model.launch_arrays import PADDING_SLOT, LaunchArrays, by_name, split_lengths
from worker_service.model.launch_buckets import PROMPT_SAMPLES, Bucket, GraphLimits, buckets
from worker_service.model.launch_inputs import LaunchInputs
from worker_service.model.sampling_arrays import greedy_arrays, sampling_arrays
from worker_service.model.staging import FixedUpload, HostArray, packed_bytes, put
from worker_service.model.state_inputs import RowPlaces, padding_arrays, put_states, put_sums, state_inputs

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
        self._bucket_rows = [bucket.num_rows for bucket in self._buckets]
        self._num_rows = max(*self._bucket_rows, limits.least_rows)
        width = -(-limits.max_model_len // limits.page_tokens)
        # Of decode rows and of as many prompts behind them.
        self._tables = [
            torch.zeros((2 * limits.max_num_seqs, width), dtype=torch.int32, device=device)
            for _ in range(limits.num_groups)
        ]
        table_bytes = packed_bytes([table.nbytes for table in self._tables])
        self._upload = FixedUpload(device, self._padding().in_order(), table_bytes)
        self._inputs = by_name(self._upload.tensors, limits.num_groups)
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
        self._last.fill_in(inputs.token_ids, self._inputs.from_previous[: inputs.token_ids.shape[0]])
        return self._forward(inputs, logits_rows, sampled)

    def bucket_for(self, batch: Batch) -> Bucket | None:
        """Returns the smallest bucket that holds the launch; None when none does."""
        num_decode = self._num_decode(batch)
        # Captured launches copy no states.
        if not batch.num_seqs or (num_decode and batch.has_decode_leaves):
            return None
        size = self._limits.size_of(batch, num_decode)
        first = bisect_left(self._bucket_rows, batch.num_tokens)
        return next((bucket for bucket in self._buckets[first:] if bucket.holds(size)), None)

    def replay(self, bucket: Bucket, batch: Batch) -> GraphOutput:
        """One copy to the device, one or two per group's tables there, one graph; results live until the next call."""
        self._fill(bucket, batch)
        graph, output = self._captured[bucket]
        graph.replay()
        samples = len(batch.sampled)
        return GraphOutput(output.tokens[:samples], output.logits[:samples])

    def _fill(self, bucket: Bucket, batch: Batch) -> None:
        num_decode = self._num_decode(batch)
        places = RowPlaces(num_decode, bucket.num_decode)
        seqlens_k, cu_q, cu_k = split_lengths(batch, num_decode)
        fixed = by_name(self._upload.begin(), self._limits.num_groups)
        put(batch.from_previous, fixed.from_previous)
        places.put(batch.token_ids, fixed.token_ids)
        places.put(batch.positions, fixed.positions)
        put(seqlens_k, fixed.decode_seqlens_k)
        put(places.of(batch.logits_rows), fixed.logits_rows)
        put_sums(cu_q, fixed.prefill_cu_q)
        put_sums(cu_k, fixed.prefill_cu_k)
        for values, target in zip(sampling_arrays(batch.sampled), fixed.sampling, strict=True):
            put(values, target)
        for slots, target in zip(batch.slot_mapping, fixed.slot_mapping, strict=True):
            places.put(slots, target)
        put_states(batch, places, fixed.states)
        self._send_tables(batch, places)

    def _send_tables(self, batch: Batch, places: RowPlaces) -> None:
        """Sends what was filled, and block tables behind it, which the device puts where the graphs read them."""
        # Groups of states have none.
        groups = [group for group, width in enumerate(batch.table_widths) if width]
        sent_tables = self._upload.send([batch.block_tables[group] for group in groups])
        for group, sent in zip(groups, sent_tables, strict=True):
            _place(self._tables[group], sent.view(batch.num_seqs, -1), places)

    def graph(self, bucket: Bucket) -> torch.cuda.CUDAGraph:
        return self._captured[bucket].graph

    def _num_decode(self, batch: Batch) -> int:
        return 0 if self._limits.one_phase else batch.num_decode_seqs

    def _padding(self) -> LaunchArrays[HostArray]:
        """Returns the fixed arrays of a launch without rows: sampling is greedy, sequences have no keys."""
        limits, size, seqs = self._limits, self._num_rows, self._limits.max_num_seqs
        num_sampled, num_leaves = seqs + PROMPT_SAMPLES, limits.num_leaves(seqs, limits.max_tokens, seqs)

        def zeros(count: int) -> array[int]:
            return array("i", (0,)) * count

        return LaunchArrays(
            from_previous=array("i", (-1,)) * seqs,
            token_ids=zeros(size),
            positions=zeros(size),
            decode_seqlens_k=zeros(seqs),
            logits_rows=zeros(num_sampled),
            prefill_cu_q=zeros(seqs + 1),
            prefill_cu_k=zeros(seqs + 1),
            sampling=greedy_arrays(num_sampled),
            slot_mapping=[array("q", (PADDING_SLOT,)) * size] * limits.num_groups,
            states=padding_arrays(sum(limits.has_states), 2 * seqs, num_leaves),
        )

    def _launch_inputs(self, bucket: Bucket) -> tuple[LaunchInputs, torch.Tensor | None, SampledInputs]:
        rows = max(bucket.num_rows, self._limits.least_rows)
        fixed = self._inputs
        states = state_inputs(self._limits.has_states, fixed.states)
        num_sampled = bucket.num_logits or bucket.num_rows
        sampled = SampledInputs(
            SamplingTensors(*(values[:num_sampled] for values in fixed.sampling)), fixed.logits_rows[:num_sampled]
        )
        inputs = LaunchInputs(
            token_ids=fixed.token_ids[:rows],
            positions=fixed.positions[:rows],
            slot_mapping=[values[:rows] for values in fixed.slot_mapping],
            block_tables=[table[: bucket.num_decode + bucket.num_prompts] for table in self._tables],
            decode_seqlens_k=fixed.decode_seqlens_k[: bucket.num_decode],
            prefill_cu_q=fixed.prefill_cu_q[: bucket.num_prompts + 1],
            prefill_cu_k=fixed.prefill_cu_k[: bucket.num_prompts + 1],
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
        return inputs, fixed.logits_rows[: bucket.num_logits] if bucket.num_logits else None, sampled


def _place(table: torch.Tensor, sent: torch.Tensor, places: RowPlaces) -> None:
    """Rows of decoding sequences to the front, those of prompts behind the bucket's decode rows."""
    num_decode, (num_rows, width) = places.num_decode, sent.shape
    if num_decode:
        table[:num_decode, :width].copy_(sent[:num_decode])
    if num_decode < num_rows:
        table[places.decode_rows : num_rows + places.shift, :width].copy_(sent[num_decode:])
