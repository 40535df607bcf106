"""Launches as CUDA graphs, captured before serving: decode steps, prompts, and prompts beside decode rows.

What a launch computes is the `Forward` that the constructor is given.

    parameters of sampling         static: of decode rows, of prompts that sample; padding rows are greedy
    token ids, positions, slots    static: the bucket's decode rows, then its prompts' tokens; padding rows: slot -1
    lengths and their sums         static: of decode rows, of prompts; sequences that are not there have no keys
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

from kernels.sample_tokens import SamplingTensors
from worker_service.core.batch import Batch, SampledRow
from worker_service.model.last_tokens import LastTokens
from worker_service.model.launch_inputs import LaunchInputs, PromptLens
from worker_service.model.sampling_arrays import NUM_ARRAYS, sampling_arrays
from worker_service.model.staging import HostArray, Upload, packed_bytes, padded

PADDING_SLOT = -1
SMALL_BATCHES = (1, 2, 4, 8)
BATCH_STEP = 8
# Beyond it the weights' share of a launch is small, so a padding row costs little and buckets may lie further apart.
WIDE_FROM = 64
WIDE_STEP = 32
# Tokens of prompts: each size at most a quarter above the one before, since padding rows are computed as well. What is
# not captured takes the host up to 47 ms, whatever its size; the device computes 2,048 tokens of an 8B model in 48.
LEAST_PROMPT_TOKENS = 16
STEPS_PER_DOUBLING = 4
# Beside decode rows: few numbers of these, and prompts that come in chunks.
MIXED_DECODE = (16, 64)
MIXED_TOKENS = (16, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Prompts that may sample in a captured launch; the head reads its weights once for that many.
PROMPT_SAMPLES = 8
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


class GraphLimits(NamedTuple):
    """What the static buffers must hold."""

    max_num_seqs: int
    max_tokens: int
    max_model_len: int
    page_tokens: int
    num_groups: int
    least_rows: int
    one_phase: bool  # decode rows go through the attention of prompts, as chunks of one token
    has_prompts: bool = True  # whether launches with prompts can be captured


class Bucket(NamedTuple):
    """The shape of one graph: decode rows, then the tokens of prompts. num_logits 0: every row's."""

    num_decode: int
    prompt_tokens: int
    num_prompts: int
    num_logits: int

    @property
    def num_rows(self) -> int:
        return self.num_decode + self.prompt_tokens

    def holds(self, batch: Batch, num_decode: int) -> bool:
        """Whether a launch can be laid out in it whose first num_decode rows decode."""
        samples = len(batch.logits_rows)
        return (
            self.num_decode >= num_decode
            and self.prompt_tokens >= batch.num_tokens - num_decode
            and self.num_prompts >= batch.num_seqs - num_decode
            and (samples <= self.num_logits if self.num_logits else samples == batch.num_tokens)
        )


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    output: GraphOutput


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of decoding sequences to capture, the largest last."""
    narrow = range(2 * BATCH_STEP, WIDE_FROM + 1, BATCH_STEP)
    wide = range(WIDE_FROM + WIDE_STEP, max_num_seqs, WIDE_STEP)
    return (*(size for size in (*SMALL_BATCHES, *narrow, *wide) if size < max_num_seqs), max_num_seqs)


def prompt_sizes(max_tokens: int) -> tuple[int, ...]:
    """Numbers of prompt tokens to capture, the largest last: 16, 32, 64, 80, 96, 112, 128, 160, ..."""
    sizes, size = [], LEAST_PROMPT_TOKENS
    while size <= max_tokens:
        sizes.append(size)
        step = (1 << size.bit_length() - 1) // STEPS_PER_DOUBLING
        size += max(step, LEAST_PROMPT_TOKENS)
    return (*sizes, max_tokens) if sizes and sizes[-1] < max_tokens else tuple(sizes)


def buckets(limits: GraphLimits) -> tuple[Bucket, ...]:
    """Every graph's shape, the smallest first."""
    seqs, tokens = limits.max_num_seqs, limits.max_tokens
    sizes = batch_sizes(seqs)
    # In one phase decode rows are among the prompts, and each of them samples.
    samples = max(seqs, PROMPT_SAMPLES) if limits.one_phase else PROMPT_SAMPLES
    prompts = [Bucket(0, size, seqs, samples) for size in prompt_sizes(tokens)]
    if limits.one_phase:
        return tuple(
            sorted([*(Bucket(0, size, size, 0) for size in sizes), *prompts], key=lambda bucket: bucket.num_rows)
        )
    mixed = [
        Bucket(num_decode, size, seqs, num_decode + PROMPT_SAMPLES)
        for num_decode in (*(few for few in MIXED_DECODE if few < seqs), seqs)
        for size in MIXED_TOKENS
        if size <= tokens
    ]
    decode = [Bucket(size, 0, 0, 0) for size in sizes]
    if not limits.has_prompts:
        return tuple(decode)
    return tuple(sorted([*decode, *prompts, *mixed], key=lambda bucket: bucket.num_rows))


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
        nothing = self._fixed(_no_rows(limits.num_groups), 0, 0)
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
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                output = self._run(bucket)
            self._captured[bucket] = Captured(graph, output)
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
        return (
            next((bucket for bucket in self._buckets if bucket.holds(batch, num_decode)), None)
            if batch.num_seqs
            else None
        )

    def replay(self, bucket: Bucket, batch: Batch) -> GraphOutput:
        """One copy to the device, one or two per group's tables there, one graph; results live until the next call."""
        num_decode = self._num_decode(batch)
        fixed = self._fixed(_rows_of(batch, num_decode), num_decode, bucket.num_decode)
        tensors = self._upload.send([*fixed, *batch.block_tables])
        for table, width, sent in zip(self._tables, batch.table_widths, tensors[len(fixed) :], strict=True):
            _place(table[:, :width], sent.view(batch.num_seqs, width), num_decode, bucket.num_decode)
        graph, output = self._captured[bucket]
        graph.replay()
        samples = len(batch.sampled)
        return GraphOutput(output.tokens[:samples], output.logits[:samples])

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
        params, slots = rest[:NUM_ARRAYS], rest[NUM_ARRAYS:]
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
        )
        return inputs, logits_rows[: bucket.num_logits] if bucket.num_logits else None, sampled


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
