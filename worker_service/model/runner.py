"""One launch: a batch's host metadata in, sampled tokens out.

Knows no queue, no lease and no stop condition; which pages hold what is in the batch's block tables.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from kernels.append_kv import append_kv
from kernels.decode_attention import decode_attention
from kernels.prefill_attention import prefill_attention
from worker_service.core.batch import Batch
from worker_service.core.sequence import TokenLogprobs
from worker_service.gpu.kv_pages import KvPages
from worker_service.model.llama import Llama
from worker_service.model.sampler import RowWishes, Sampled, sample
from worker_service.model.staging import Download, HostArray, Upload
from worker_service.model.wishes import HostWishes, host_wishes

# A GEMM's rows keep their bits whoever shares the launch, from this many rows on; smaller launches are padded.
LEAST_ROWS = {"cuda": 8, "cpu": 16}
PADDING_SLOT = -1


class LaunchResult(NamedTuple):
    """One entry for each of the batch's `sampled` rows, in that order; logprobs are None for rows that did not ask."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class Runner:
    """Runs batches one at a time on one device. `run` returns when the launch is complete: then it may be published.

    One copy to the device per launch, one back (the sampled tokens), nothing else waits for the device.
    """

    def __init__(self, model: Llama, kv_pages: KvPages, device: torch.device) -> None:
        self._model = model
        self._kv_pages = kv_pages
        self._upload = Upload(device)
        self._download = Download(device)
        self._least_rows = LEAST_ROWS[device.type]

    def run(self, batch: Batch) -> LaunchResult:
        wishes = host_wishes(batch.sampled)
        with torch.inference_mode():
            staged = self._staged(batch, wishes)
            hidden = self._hidden(batch, staged)
            sampled = self._sampled(hidden, batch, staged, wishes) if batch.sampled else None
            values = self._download.fetch(_joined(sampled, staged.token_ids))
            return _unjoined(values, batch, wishes.flags.num_logprobs)

    def logits(self, batch: Batch) -> torch.Tensor:
        """The launch without sampling: fp32 [sampled rows, vocab_size] on the device."""
        with torch.inference_mode():
            staged = self._staged(batch, host_wishes(batch.sampled))
            return self._logits(self._hidden(batch, staged), batch, staged)

    def _hidden(self, batch: Batch, staged: _Staged) -> torch.Tensor:
        attention = _PagedAttention(self._kv_pages, batch, staged)
        return self._model.forward(staged.token_ids, staged.positions, attention)

    def _logits(self, hidden: torch.Tensor, batch: Batch, staged: _Staged) -> torch.Tensor:
        return self._model.logits(hidden[staged.logits_rows])[: len(batch.sampled)]

    def _sampled(self, hidden: torch.Tensor, batch: Batch, staged: _Staged, wishes: HostWishes) -> Sampled:
        return sample(self._logits(hidden, batch, staged), staged.wishes, wishes.flags)

    def _staged(self, batch: Batch, wishes: HostWishes) -> _Staged:
        padding = max(self._least_rows - batch.num_tokens, 0)
        row_padding = max(self._least_rows - len(batch.logits_rows), 0) if batch.logits_rows else 0
        slots = [_padded(slots, padding, PADDING_SLOT) for slots in batch.slot_mapping]
        tensors = iter(
            self._upload.send(
                [
                    _padded(batch.token_ids, padding, 0),
                    _padded(batch.positions, padding, 0),
                    _padded(batch.logits_rows, row_padding, 0),
                    *_split_lengths(batch),
                    *slots,
                    *batch.block_tables,
                    *wishes.arrays,
                ]
            )
        )
        return _Staged(
            token_ids=next(tensors),
            positions=next(tensors),
            logits_rows=next(tensors),
            decode_seqlens_k=next(tensors),
            prefill_cu_q=next(tensors),
            prefill_cu_k=next(tensors),
            slot_mapping=[next(tensors) for _ in slots],
            block_tables=[next(tensors).view(batch.num_seqs, width) for width in batch.table_widths],
            wishes=RowWishes(*tensors),
        )


@dataclass(frozen=True, slots=True)
class _Staged:
    """A batch on the device. Lengths are split at the last decode row, as two kernels share the launch."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_rows: torch.Tensor
    decode_seqlens_k: torch.Tensor
    prefill_cu_q: torch.Tensor
    prefill_cu_k: torch.Tensor
    slot_mapping: list[torch.Tensor]
    block_tables: list[torch.Tensor]
    wishes: RowWishes


class _PagedAttention:
    """The model's `Attend` for one launch: new K and V go to their slots first, so attention reads pages alone."""

    def __init__(self, kv_pages: KvPages, batch: Batch, staged: _Staged) -> None:
        self._kv_pages = kv_pages
        self._batch = batch
        self._staged = staged

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, staged = self._batch, self._staged
        k_pages, v_pages, group, window = self._kv_pages.layer_pages(layer)
        append_kv(k, v, k_pages, v_pages, staged.slot_mapping[group])
        num_decode, num_tokens = batch.num_decode_seqs, batch.num_tokens
        tables = staged.block_tables[group]
        out = torch.empty_like(q)
        out[num_tokens:].zero_()
        if num_decode:
            decode_attention(
                q[:num_decode],
                k_pages,
                v_pages,
                tables[:num_decode],
                staged.decode_seqlens_k,
                max_seqlen_k=batch.max_seqlen_k,
                window=window,
                out=out[:num_decode],
            )
        if num_decode < batch.num_seqs:
            prefill_attention(
                q[num_decode:num_tokens],
                k_pages,
                v_pages,
                tables[num_decode:],
                staged.prefill_cu_q,
                staged.prefill_cu_k,
                batch.max_seqlen_q,
                window=window,
                out=out[num_decode:num_tokens],
            )
        return out


def _padded(values: array[int], padding: int, value: int) -> array[int]:
    return values + array(values.typecode, (value,)) * padding if padding else values


def _split_lengths(batch: Batch) -> tuple[HostArray, HostArray, HostArray]:
    """Key lengths of the decode rows; running sums of the prefill rows, from 0 anew."""
    num_decode = batch.num_decode_seqs
    cu_q, cu_k = batch.cu_seqlens_q, batch.cu_seqlens_k
    decode_lengths = array("i", (end - start for start, end in pairwise(cu_k[: num_decode + 1])))
    return (
        decode_lengths,
        array("i", (end - cu_q[num_decode] for end in cu_q[num_decode:])),
        array("i", (end - cu_k[num_decode] for end in cu_k[num_decode:])),
    )


def _joined(sampled: Sampled | None, nothing: torch.Tensor) -> torch.Tensor:
    """Tokens and log-probabilities as one int32 tensor (floats by their bits), so that one copy brings them all."""
    if sampled is None:
        return nothing[:0]
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
