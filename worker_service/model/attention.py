"""Attention of one launch over the pages: new K and V go to their slots first, so attention reads pages alone.

The tokens' slots and block tables are in the launch's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.decode_attention import DecodePlan, decode_attention
from kernels.prefill_attention import PrefillPlan, prefill_attention
from kernels.rotate_append_kv import RotatedQueries, rotate_append_kv
from worker_service.gpu.kv_pages import KvPages
from worker_service.model.config import ModelConfig
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
    num_decode: int
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def num_prefill(self) -> int:
        """Sequences with a chunk of their prompt in this launch."""
        return self.prefill_cu_q.shape[0] - 1


class AttentionPlans:
    """Work lists and counters of the attention kernels on CUDA, made once: a launch prepares them for all its layers.

    A launch that is too large for them does without; its kernels then make their own. References need none.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_num_seqs: int,
        max_tokens: int,
        device: torch.device,
        backend: Backend = Backend.AUTO,
    ) -> None:
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self.backend = backend
        self._max_num_seqs, self._max_tokens = max_num_seqs, max_tokens
        self._decode = DecodePlan(max_num_seqs, config.max_model_len, *heads, device=device)
        self._prefill = PrefillPlan(max_num_seqs, max_tokens, *heads, device=device)

    def prepared(self, launch: LaunchInputs) -> tuple[DecodePlan | None, PrefillPlan | None]:
        if self.backend is Backend.REFERENCE:
            return None, None
        decode = self._decode if 0 < launch.num_decode <= self._max_num_seqs else None
        if decode is not None:
            decode.prepare(launch.decode_seqlens_k)
        num_others = launch.token_ids.shape[0] - launch.num_decode
        has_room = launch.num_prefill <= self._max_num_seqs and num_others <= self._max_tokens
        prefill = self._prefill if launch.num_prefill and has_room else None
        if prefill is not None:
            prefill.prepare(launch.prefill_cu_q, launch.prefill_cu_k)
        return decode, prefill


class PagedAttention:
    """The model's `Attend` for one launch. Queries of decode rows stay in rows, the others are packed by kv head."""

    def __init__(self, kv_pages: KvPages, num_heads: int, launch: LaunchInputs, plans: AttentionPlans) -> None:
        self._kv_pages = kv_pages
        self._num_heads = num_heads
        self._launch = launch
        self._backend = plans.backend
        self._decode_plan, self._prefill_plan = plans.prepared(launch)

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        k_pages, v_pages, group, _ = self._kv_pages.layer_pages(layer)
        queries = rotate_append_kv(
            heads.qkv,
            heads.positions,
            heads.cos_sin,
            k_pages,
            v_pages,
            self._launch.slot_mapping[group],
            q_heads=self._num_heads,
            q_norm=heads.q_norm,
            k_norm=heads.k_norm,
            eps=heads.eps,
            num_unpacked=self._launch.num_decode,
            backend=self._backend,
        )
        return self.attended(layer, queries)

    def attended(self, layer: int, queries: RotatedQueries) -> torch.Tensor:
        """Returns the attention of the launch's queries over this layer's pages: [num_tokens, q_heads, head_dim].

        Padding rows are not written; their content stays in their row and is never read.
        """
        num_decode = self._launch.num_decode
        out = torch.empty_like(queries.unpacked)
        if num_decode:
            self._attend_decode(layer, queries.unpacked[:num_decode], out[:num_decode])
        if self._launch.num_prefill:
            self._attend_prefill(layer, queries.packed, out[num_decode:])
        return out

    def _attend_decode(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        k_pages, v_pages, group, window = self._kv_pages.layer_pages(layer)
        decode_attention(
            q,
            k_pages,
            v_pages,
            self._launch.block_tables[group][: self._launch.num_decode],
            self._launch.decode_seqlens_k,
            max_seqlen_k=self._launch.max_seqlen_k,
            plan=self._decode_plan,
            window=window,
            out=out,
            backend=self._backend,
        )

    def _attend_prefill(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        k_pages, v_pages, group, window = self._kv_pages.layer_pages(layer)
        prefill_attention(
            q,
            k_pages,
            v_pages,
            self._launch.block_tables[group][self._launch.num_decode :],
            self._launch.prefill_cu_q,
            self._launch.prefill_cu_k,
            self._launch.max_seqlen_q,
            plan=self._prefill_plan,
            window=window,
            out=out,
            backend=self._backend,
        )
