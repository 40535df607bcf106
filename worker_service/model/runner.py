"""Runs one launch: a batch's host metadata in, sampled tokens out.

Which pages hold what is in the batch's block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.backend import Backend
from kernels.mla.plan import CHUNK_TOKENS
from kernels.sample_tokens import SamplingTensors, sample_tokens
from session.words import GroupKind
from worker_service.core.batch import Batch, SampledRow
from worker_service.core.runner_port import Completed, LaunchTokens
from worker_service.gpu.page_pools import PagePools
from worker_service.model.attention import AttentionPlans
from worker_service.model.compressed_attention import CompressedPlans
from worker_service.model.decoder import Decoder
from worker_service.model.device_clock import DeviceClock, LaunchMarks, times_of
from worker_service.model.gemm_dispatch import MOST_PADDING, GemmDispatch, Invariance
from worker_service.model.last_tokens import LastTokens
from worker_service.model.latent_attention import LatentPlans
from worker_service.model.launch_arrays import PADDING_SLOT, LaunchArrays, by_name, prompt_lens, split_lengths
from worker_service.model.launch_attention import LaunchAttention, Plans
from worker_service.model.launch_buckets import PROMPT_SAMPLES, GraphLimits
from worker_service.model.launch_graphs import GraphOutput, LaunchGraphs, SampledInputs
from worker_service.model.launch_inputs import LaunchInputs
from worker_service.model.launch_states import LaunchStates
from worker_service.model.penalty_counts import PenaltyCounts
from worker_service.model.results import joined, unjoined
from worker_service.model.sampling_arrays import most_logprobs, sampling_arrays
from worker_service.model.sparse_attention import SparsePlans
from worker_service.model.staging import Download, Downloaded, HostArray, Upload, padded
from worker_service.model.state_inputs import state_arrays, state_inputs


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Bounds of a launch, and how it is computed; larger batches than these run too, but uncaptured."""

    max_num_seqs: int = 64
    token_budget: int = 2048
    invariance: Invariance = Invariance.BATCH
    graphs: bool = False
    latent_chunk_tokens: int = CHUNK_TOKENS
    attention_segment_tokens: int = 0


class RunningLaunch(NamedTuple):
    """A launch that was submitted. When `wait` returns, it is complete, and what it computed may be published."""

    download: Downloaded
    marks: LaunchMarks
    sampled: tuple[SampledRow, ...]
    num_logprobs: int

    def wait(self) -> Completed:
        result = unjoined(self.download.wait(), self.sampled, self.num_logprobs)
        return Completed(result, times_of(self.marks))


class Runner:
    """Runs batches on one device, one after another; the next one may be submitted before the last one is complete.

    One copy to the device per launch, one back (the sampled tokens), nothing else waits for the device. The tokens of a
    sequence with penalties are copied apart, before its first launch that samples.
    """

    def __init__(
        self, model: Decoder, pools: PagePools, device: torch.device, limits: RunnerLimits | None = None
    ) -> None:
        limits = limits or RunnerLimits()
        self._model = model
        self._pools = pools
        self._has_states = tuple(layout.kind is GroupKind.STATE for layout in pools.layouts)
        self._upload = Upload(device)
        self._download = Download(device)
        self._clock = DeviceClock(device)
        self._last = LastTokens(limits.max_num_seqs + PROMPT_SAMPLES, device)
        self._counts = PenaltyCounts(limits.max_num_seqs, model.spec.vocab_size, device)
        self._gemm = GemmDispatch(model.linears(), limits.invariance, limits.token_budget, model.backend)
        self._one_phase = limits.invariance is Invariance.STRICT
        # Padding rows come on top of the budget.
        max_tokens = limits.token_budget + MOST_PADDING
        self._plans = Plans(
            AttentionPlans(
                model.spec,
                limits.max_num_seqs,
                max_tokens,
                device,
                model.backend,
                segment_tokens=limits.attention_segment_tokens,
            ),
            LatentPlans(
                model.spec,
                limits.max_num_seqs,
                max_tokens,
                limits.latent_chunk_tokens,
                limits.invariance,
                device,
                model.backend,
            ),
            SparsePlans(model.spec, model.backend),
            CompressedPlans(model.spec, model.backend),
        )
        self._graphs: LaunchGraphs | None = None
        # Latents absorbed for prompts are not captured; references wait for the device, which no capture allows.
        captures = not (self._one_phase and self._plans.latents.mixers)
        if limits.graphs and captures and device.type == "cuda" and model.backend is not Backend.REFERENCE:
            with torch.inference_mode():
                self._graphs = self._captured_graphs(limits, device)

    def run(self, batch: Batch) -> LaunchTokens:
        """Runs one launch alone."""
        return self.submit(batch).wait().tokens

    def submit(self, batch: Batch) -> RunningLaunch:
        num_logprobs = most_logprobs(batch.sampled)
        with torch.inference_mode():
            self._clock.start()
            output = self._launched(batch)
            values = joined(output.tokens, output.logits, num_logprobs, self._model.backend)
            # Before the copy, which is what `wait` waits for.
            marks = self._clock.end()
            return RunningLaunch(self._download.start(values), marks, batch.sampled, num_logprobs)

    def set_previous(self, token_ids: Sequence[int]) -> None:
        with torch.inference_mode():
            self._last.put_from_host(token_ids)

    def logits(self, batch: Batch) -> torch.Tensor:
        """The launch, for its logits: fp32 [sampled rows, vocab_size] on the device."""
        with torch.inference_mode():
            return self._launched(batch).logits.float()

    def _launched(self, batch: Batch) -> GraphOutput:
        self._counts.recount(batch.sampled)
        bucket = self._graphs.bucket_for(batch) if self._graphs else None
        if self._graphs and bucket:
            return self._graphs.replay(bucket, batch)
        staged = self._staged(batch)
        if batch.sampled:
            return self._computed(staged.inputs, staged.logits_rows, staged.sampled)
        hidden = self._hidden(staged.inputs)
        return GraphOutput(staged.inputs.token_ids[:0], hidden[:0])

    def _computed(self, inputs: LaunchInputs, logits_rows: torch.Tensor | None, sampled: SampledInputs) -> GraphOutput:
        """The forward pass, the logits of these rows (None: of all) and a token of each row of `sampled`."""
        hidden = self._hidden(inputs)
        num_sampled = sampled.rows.shape[0]
        logits = self._model.logits(hidden if logits_rows is None else hidden[logits_rows], self._gemm)[:num_sampled]
        counts = self._counts.of(inputs.token_ids, inputs.positions, sampled.rows)
        out = self._last.first(num_sampled)
        return GraphOutput(sample_tokens(logits, sampled.params, counts, out=out, backend=self._model.backend), logits)

    def _hidden(self, inputs: LaunchInputs) -> torch.Tensor:
        attention = self.attention(inputs)
        states = LaunchStates(self._pools, inputs, self._model.backend)
        return self._model.forward(inputs.token_ids, inputs.positions, attention, states, self._gemm)

    def attention(self, inputs: LaunchInputs) -> LaunchAttention:
        """Returns the attention of one launch, which all its layers share."""
        return LaunchAttention(self._pools, inputs, self._plans, self._gemm)

    def _captured_graphs(self, limits: RunnerLimits, device: torch.device) -> LaunchGraphs:
        latents, spec = self._plans.latents, self._model.spec
        chooses_keys = bool(self._plans.sparse.mixers or self._plans.compressed.mixers)
        bounds = GraphLimits(
            max_num_seqs=limits.max_num_seqs,
            max_tokens=limits.token_budget,
            max_model_len=spec.max_model_len,
            page_tokens=self._pools.page_tokens,
            num_groups=self._pools.num_groups,
            least_rows=self._gemm.least_rows,
            one_phase=self._one_phase,
            has_prompts=not latents.mixers or latents.captured_latents > 0,
            max_prompt_keys=spec.max_model_len if chooses_keys else latents.captured_latents,
            chooses_keys=chooses_keys,
            has_states=self._has_states,
        )
        graphs = LaunchGraphs(self._computed, self._last, bounds, device)
        graphs.capture()
        return graphs

    def _staged(self, batch: Batch) -> _Staged:
        num_decode = 0 if self._one_phase else batch.num_decode_seqs
        arrays = self._arrays(batch, num_decode).in_order()
        tensors = self._upload.send([*arrays, *batch.block_tables])
        sent, tables = by_name(tensors[: len(arrays)], len(batch.slot_mapping)), tensors[len(arrays) :]
        inputs = LaunchInputs(
            token_ids=sent.token_ids,
            positions=sent.positions,
            slot_mapping=sent.slot_mapping,
            block_tables=[
                table.view(batch.num_seqs, width) for table, width in zip(tables, batch.table_widths, strict=True)
            ],
            decode_seqlens_k=sent.decode_seqlens_k,
            prefill_cu_q=sent.prefill_cu_q,
            prefill_cu_k=sent.prefill_cu_k,
            num_decode=num_decode,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            prompt_lens=prompt_lens(batch, num_decode),
            states=state_inputs(self._has_states, sent.states),
        )
        if batch.from_previous:
            self._last.fill_in(sent.token_ids, sent.from_previous)
        sampled = SampledInputs(SamplingTensors(*sent.sampling), sent.logits_rows[: len(batch.sampled)])
        return _Staged(inputs, sent.logits_rows, sampled)

    def _arrays(self, batch: Batch, num_decode: int) -> LaunchArrays[HostArray]:
        rows = batch.num_tokens + self._gemm.num_padding(batch.num_tokens)
        num_logits = len(batch.logits_rows) + self._gemm.num_padding(len(batch.logits_rows))
        decode_seqlens_k, prefill_cu_q, prefill_cu_k = split_lengths(batch, num_decode)
        return LaunchArrays(
            from_previous=batch.from_previous,
            token_ids=padded(batch.token_ids, rows, 0),
            positions=padded(batch.positions, rows, 0),
            decode_seqlens_k=decode_seqlens_k,
            logits_rows=padded(batch.logits_rows, num_logits, 0),
            prefill_cu_q=prefill_cu_q,
            prefill_cu_k=prefill_cu_k,
            sampling=sampling_arrays(batch.sampled),
            # Groups of states have no slots.
            slot_mapping=[padded(slots, rows, PADDING_SLOT) if slots else slots for slots in batch.slot_mapping],
            states=state_arrays(batch),
        )


class _Staged(NamedTuple):
    inputs: LaunchInputs
    logits_rows: torch.Tensor
    sampled: SampledInputs
