"""Attention of one launch over the pages: new K and V go to their slots first, so attention reads pages alone.

Knows no request and no schedule; where the tokens stand is in the launch's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.decode_attention import decode_attention
from kernels.prefill_attention import prefill_attention
from kernels.rotate_append_kv import rotate_append_kv
from worker_service.gpu.kv_pages import KvPages
from worker_service.model.llama import Heads


@dataclass(frozen=True, slots=True)
class LaunchInputs:
    """A batch on the device, padding rows last; the integers are the host's knowledge or bounds.

    Lengths are split at the last decode row, as two kernels share the launch.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: Sequence[torch.Tensor]
    block_tables: Sequence[torch.Tensor]
    decode_seqlens_k: torch.Tensor
    prefill_cu_q: torch.Tensor
    prefill_cu_k: torch.Tensor
    num_tokens: int
    num_decode: int
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def num_prefill(self) -> int:
        """Sequences with a chunk of their prompt in this launch."""
        return self.prefill_cu_q.shape[0] - 1


class PagedAttention:
    """The model's `Attend` for one launch."""

    def __init__(self, kv_pages: KvPages, num_heads: int, launch: LaunchInputs) -> None:
        self._kv_pages = kv_pages
        self._num_heads = num_heads
        self._launch = launch

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        launch = self._launch
        k_pages, v_pages, group, window = self._kv_pages.layer_pages(layer)
        queries = rotate_append_kv(
            heads.qkv,
            heads.positions,
            heads.cos_sin,
            k_pages,
            v_pages,
            launch.slot_mapping[group],
            q_heads=self._num_heads,
            q_norm=heads.q_norm,
            k_norm=heads.k_norm,
            eps=heads.eps,
            num_unpacked=heads.qkv.shape[0],
        )
        q, num_decode = queries.unpacked, launch.num_decode
        tables = launch.block_tables[group]
        out = torch.empty_like(q)
        out[launch.num_tokens :].zero_()
        if num_decode:
            decode_attention(
                q[:num_decode],
                k_pages,
                v_pages,
                tables[:num_decode],
                launch.decode_seqlens_k,
                max_seqlen_k=launch.max_seqlen_k,
                window=window,
                out=out[:num_decode],
            )
        if launch.num_prefill:
            prefill_attention(
                q[num_decode : launch.num_tokens],
                k_pages,
                v_pages,
                tables[num_decode:],
                launch.prefill_cu_q,
                launch.prefill_cu_k,
                launch.max_seqlen_q,
                window=window,
                out=out[num_decode : launch.num_tokens],
            )
        return out
