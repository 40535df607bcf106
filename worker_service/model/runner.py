"""Runs one launch: a batch's host metadata in, sampled tokens out.

Which pages hold what is in the batch's block tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.backend import Backend
from worker_service.core.batch import Batch
from worker_service.core.sequence import TokenLogprobs
from worker_service.gpu.kv_pages import KvPages
from worker_service.model.attention import AttentionPlans, LaunchInputs, PagedAttention
from worker_service.model.gemm_dispatch import MOST_PADDING, GemmDispatch, Invariance
from worker_service.model.launch_graphs import PADDING_SLOT, GraphLimits, GraphOutput, LaunchGraphs, split_lengths
from worker_service.model.llama import Llama
from worker_service.model.sampler import Flags, Sampled, SamplingTensors, sample
from worker_service.model.sampling_arrays import SamplingArrays, sampling_arrays
from worker_service.model.staging import Download, Upload, padded


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Bounds of a launch, and how it is computed; larger batches than these run too, but uncaptured."""

    max_num_seqs: int = 64
    token_budget: int = 2048
    invariance: Invariance = Invariance.BATCH
    graphs: bool = False


class LaunchResult(NamedTuple):
    """One entry for each of the batch's `sampled` rows, in that order; logprobs are None for rows that did not ask."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class Runner:
    """Runs batches one at a time on one device. `run` returns when the launch is complete: then it may be published.

    One copy to the device per launch (two when a captured one is not to sample greedily), one back (the sampled
    tokens), nothing else waits for the device.
    """

    def __init__(
        self, model: Llama, kv_pages: KvPages, device: torch.device, limits: RunnerLimits | None = None
    ) -> None:
        limits = limits or RunnerLimits()
        self._model = model
        self._kv_pages = kv_pages
        self._upload = Upload(device)
        self._download = Download(device)
        self._gemm = GemmDispatch(model.linears(), limits.invariance, limits.token_budget, model.backend)
        self._one_phase = limits.invariance is Invariance.STRICT
        # Padding rows come on top of the budget.
        max_tokens = limits.token_budget + MOST_PADDING
        self._plans = AttentionPlans(model.config, limits.max_num_seqs, max_tokens, device, model.backend)
        self._graphs: LaunchGraphs | None = None
        # References wait for the device, which no capture allows.
        if limits.graphs and device.type == "cuda" and model.backend is not Backend.REFERENCE:
            with torch.inference_mode():
                self._graphs = self._captured_graphs(limits, device)

    def run(self, batch: Batch) -> LaunchResult:
        sampling = sampling_arrays(batch.sampled)
        with torch.inference_mode():
            values = self._download.fetch(self._launch(batch, sampling))
            return _unjoined(values, batch, sampling.flags.num_logprobs)

    def logits(self, batch: Batch) -> torch.Tensor:
        """The launch without sampling: fp32 [sampled rows, vocab_size] on the device."""
        with torch.inference_mode():
            output = self._replayed(batch)
            if output is not None:
                return output.logits.float()
            staged = self._staged(batch, sampling_arrays(batch.sampled))
            return self._logits(staged, batch)

    def _launch(self, batch: Batch, sampling: SamplingArrays) -> torch.Tensor:
        """Returns what is copied back to the host, as one int32 tensor."""
        output = self._replayed(batch)
        if output is not None:
            if not batch.sampled or _is_greedy(sampling.flags):
                return output.tokens
            tensors = SamplingTensors(*self._upload.send(sampling.arrays))
            return _joined(sample(output.logits.float(), tensors, sampling.flags))
        staged = self._staged(batch, sampling)
        if not batch.sampled:
            self._hidden(staged.inputs)
            return staged.inputs.token_ids[:0]
        return _joined(sample(self._logits(staged, batch), staged.sampling, sampling.flags))

    def _replayed(self, batch: Batch) -> GraphOutput | None:
        bucket = self._graphs.bucket_for(batch) if self._graphs else None
        return self._graphs.replay(bucket, batch) if self._graphs and bucket else None

    def _hidden(self, inputs: LaunchInputs) -> torch.Tensor:
        attention = self.attention(inputs)
        return self._model.forward(inputs.token_ids, inputs.positions, attention, self._gemm)

    def attention(self, inputs: LaunchInputs) -> PagedAttention:
        """Returns the attention of one launch, which all its layers share."""
        return PagedAttention(self._kv_pages, self._model.config.num_heads, inputs, self._plans)

    def _logits(self, staged: _Staged, batch: Batch) -> torch.Tensor:
        hidden = self._hidden(staged.inputs)
        return self._model.logits(hidden[staged.logits_rows], self._gemm)[: len(batch.sampled)].float()

    def _captured_graphs(self, limits: RunnerLimits, device: torch.device) -> LaunchGraphs:
        bounds = GraphLimits(
            max_num_seqs=limits.max_num_seqs,
            max_tokens=limits.token_budget,
            max_model_len=self._model.config.max_model_len,
            page_tokens=self._kv_pages.page_tokens,
            num_groups=self._kv_pages.num_groups,
            least_rows=self._gemm.least_rows,
            one_phase=self._one_phase,
        )
        graphs = LaunchGraphs(self._captured_forward, bounds, device)
        graphs.capture()
        return graphs

    def _captured_forward(self, inputs: LaunchInputs, logits_rows: torch.Tensor | None) -> GraphOutput:
        """The captured part: the forward pass, the logits of these rows (None: of all but padding) and their argmax."""
        hidden = self._hidden(inputs)
        rows = hidden if logits_rows is None else hidden[logits_rows]
        logits = self._model.logits(rows, self._gemm)
        # In the model's dtype: widening to fp32, as the sampler does, would change no order.
        return GraphOutput(logits.argmax(dim=-1).to(torch.int32), logits)

    def _staged(self, batch: Batch, sampling: SamplingArrays) -> _Staged:
        num_decode = 0 if self._one_phase else batch.num_decode_seqs
        rows = batch.num_tokens + self._gemm.num_padding(batch.num_tokens)
        logits_rows = len(batch.logits_rows) + self._gemm.num_padding(len(batch.logits_rows))
        slots = [padded(values, rows, PADDING_SLOT) if values else values for values in batch.slot_mapping]
        tensors = iter(
            self._upload.send(
                [
                    padded(batch.token_ids, rows, 0),
                    padded(batch.positions, rows, 0),
                    padded(batch.logits_rows, logits_rows, 0),
                    *split_lengths(batch, num_decode),
                    *slots,
                    *batch.block_tables,
                    *sampling.arrays,
                ]
            )
        )
        token_ids, positions, logits_index, decode_seqlens_k, cu_q, cu_k = (next(tensors) for _ in range(6))
        inputs = LaunchInputs(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=[next(tensors) for _ in slots],
            block_tables=[next(tensors).view(batch.num_seqs, width) for width in batch.table_widths],
            decode_seqlens_k=decode_seqlens_k,
            prefill_cu_q=cu_q,
            prefill_cu_k=cu_k,
            num_decode=num_decode,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
        )
        return _Staged(inputs, logits_index, SamplingTensors(*tensors))


class _Staged(NamedTuple):
    inputs: LaunchInputs
    logits_rows: torch.Tensor
    sampling: SamplingTensors


def _is_greedy(flags: Flags) -> bool:
    return not flags.any_random and not flags.any_penalty and flags.num_logprobs < 0


def _joined(sampled: Sampled) -> torch.Tensor:
    """Tokens and log-probabilities as one int32 tensor (floats by their bits), so that one copy brings them all."""
    parts = [sampled.tokens.to(torch.int32)]
    if sampled.logprobs is not None:
        parts.append(sampled.logprobs.view(torch.int32))
    if sampled.top_tokens is not None and sampled.top_logprobs is not None:
        parts.append(sampled.top_tokens.to(torch.int32).flatten())
        parts.append(sampled.top_logprobs.contiguous().view(torch.int32).flatten())
    return torch.cat(parts)


def _unjoined(values: torch.Tensor, batch: Batch, num_logprobs: int) -> LaunchResult:
    rows = len(batch.sampled)
    token_ids = tuple(values[:rows].tolist())
    if num_logprobs < 0:
        return LaunchResult(token_ids, (None,) * rows)
    chosen = values[rows : 2 * rows].view(torch.float32).tolist()
    tops = values[2 * rows :].view(2, rows, -1) if num_logprobs else values.new_empty(2, rows, 0)
    top_ids, top_logprobs = tops[0].tolist(), tops[1].view(torch.float32).tolist()
    logprobs = tuple(
        _row_logprobs(entry.sampling.logprobs, *row)
        for entry, *row in zip(batch.sampled, chosen, top_ids, top_logprobs, strict=True)
    )
    return LaunchResult(token_ids, logprobs)


def _row_logprobs(wanted: int | None, sampled: float, ids: list[int], values: list[float]) -> TokenLogprobs | None:
    if wanted is None:
        return None
    return TokenLogprobs(sampled, tuple(zip(ids[:wanted], values[:wanted], strict=True)))
