"""Attention of one launch over the pages: new K and V go to their slots first, so attention reads pages alone.

The tokens' slots and block tables are in the launch's tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.attention import AttentionOptions
from kernels.backend import Backend, is_hopper
from kernels.decode_attention import DecodePlan, decode_attention
from kernels.device import num_multiprocessors
from kernels.fp8 import E4M3
from kernels.prefill_attention import PrefillPlan, prefill_attention
from kernels.prefill_attention.few_scratch import few_rows_bytes
from kernels.prefill_attention.hopper import takes_dim
from kernels.prefill_attention.hopper.few import shares
from kernels.prefill_attention.segments import segment_keys
from kernels.prefill_attention.units import states_bytes
from kernels.rotate_append_kv import RotatedQueries, rotate_append_kv
from worker_service.gpu.page_pools import PagePools
from worker_service.model.attention_specs import AttentionSpec
from worker_service.model.kv_scales import NO_SCALES, KvScales
from worker_service.model.launch_inputs import LaunchInputs
from worker_service.model.mixers import Heads
from worker_service.model.spec import ModelSpec


class PlanKey(NamedTuple):
    """What plans are made for; layers with the same key share them. `window_tokens` 0: none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_tokens: int


class Prepared(NamedTuple):
    """The plans of one launch for layers of one key; None: the kernels make their own."""

    decode: DecodePlan | None
    prefill: PrefillPlan | None


class AttentionPlans:
    """Work lists and counters of the attention kernels on CUDA, made once: a launch prepares them for all its layers.

    A launch that is too large for them does without; its kernels then make their own. References need none.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_num_seqs: int,
        max_tokens: int,
        device: torch.device,
        backend: Backend = Backend.AUTO,
        *,
        segment_tokens: int = 0,
    ) -> None:
        self.mixers = attention_mixers(spec)
        self.backend = backend
        self.segment_tokens = segment_tokens
        self._max_num_seqs, self._max_tokens = max_num_seqs, max_tokens
        self._keys = dict.fromkeys(map(plan_key, self.mixers.values()))
        self._decode = {
            key: DecodePlan(max_num_seqs, spec.max_model_len, *key[:3], window=key.window_tokens, device=device)
            for key in self._keys
        }
        # Work lists of prompts are the same with and without a window.
        self._prefill = {
            shape: PrefillPlan(max_num_seqs, max_tokens, *shape, device=device, segment_tokens=segment_tokens)
            for shape in dict.fromkeys(key[:3] for key in self._keys)
        }

    def prepared(self, launch: LaunchInputs) -> dict[PlanKey, Prepared]:
        if self.backend is Backend.REFERENCE:
            return dict.fromkeys(self._keys, Prepared(None, None))
        has_decode = 0 < launch.num_decode <= self._max_num_seqs
        num_others = launch.token_ids.shape[0] - launch.num_decode
        has_prefill = 0 < launch.num_prefill <= self._max_num_seqs and num_others <= self._max_tokens
        if has_decode:
            for decode in self._decode.values():
                decode.prepare(launch.decode_seqlens_k)
        if has_prefill:
            for prefill in self._prefill.values():
                prefill.prepare(launch.prefill_cu_q, launch.prefill_cu_k)
        return {
            key: Prepared(
                self._decode[key] if has_decode else None,
                self._prefill[key[:3]] if has_prefill else None,
            )
            for key in self._keys
        }


def attention_mixers(spec: ModelSpec) -> dict[int, AttentionSpec]:
    """Returns the layers with attention over keys and values of heads, by number."""
    return {
        number: mixer
        for number, layer in enumerate(spec.layers)
        for mixer in layer.mixers
        if isinstance(mixer, AttentionSpec)
    }


def _head_shapes(spec: ModelSpec) -> list[tuple[int, int, int]]:
    """Returns query heads, KV heads and elements of a head, each combination once."""
    return list(dict.fromkeys(plan_key(mixer)[:3] for mixer in attention_mixers(spec).values()))


def plan_key(mixer: AttentionSpec) -> PlanKey:
    return PlanKey(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.window_tokens)


def reason_against_segments(
    spec: ModelSpec, backend: Backend, page_dtype: torch.dtype | None, device: torch.device
) -> str | None:
    """Returns why no layer computes prompts by segments of keys, whatever the setting; None where some may."""
    if backend is Backend.REFERENCE or not is_hopper(device):
        return "only the kernel for Hopper GPUs has segments"
    mixers = attention_mixers(spec).values()
    dims = [mixer.head_dim for mixer in mixers if segment_keys(1, mixer.head_dim, mixer.window_tokens)]
    if not dims:
        return "no layer attends to all keys with heads of up to 128 elements"
    if not any(takes_dim(dim, quantized=page_dtype is not None) for dim in dims):
        return f"the kernel takes no heads of {dims[0]} elements with such pages"
    return None


def segments_workspace_bytes(spec: ModelSpec, segment_tokens: int, device: torch.device) -> int:
    """Returns the memory that prompts by segments of keys take beside the pools: states for each shape of heads."""
    if not is_hopper(device):
        return 0
    dims = [dim for _, _, dim in _head_shapes(spec) if segment_keys(segment_tokens, dim, window=0)]
    return sum(states_bytes(dim, num_multiprocessors(device)) for dim in dims)


def few_rows_workspace_bytes(spec: ModelSpec, segment_tokens: int, device: torch.device) -> int:
    """Returns the memory that prompts of few tokens take beside the pools: a scratch for each shape of heads."""
    if segment_tokens or not is_hopper(device):
        return 0
    shared = (dim for q_heads, kv_heads, dim in _head_shapes(spec) if shares(q_heads // kv_heads, dim))
    return sum(few_rows_bytes(dim) for dim in shared)


class PagedHeads:
    """Attention over keys and values in pages, for one launch.

    Queries of decode rows stay in rows, the others are packed by kv head.
    """

    def __init__(self, pools: PagePools, launch: LaunchInputs, plans: AttentionPlans) -> None:
        self._pools = pools
        self._launch = launch
        self._mixers = plans.mixers
        self._backend = plans.backend
        self._segment_tokens = plans.segment_tokens
        self._prepared = plans.prepared(launch)

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        pages = self._pools.layer_pages(layer)
        scales = heads.scales if pages.k.dtype is E4M3 else NO_SCALES
        queries = rotate_append_kv(
            heads.qkv,
            heads.positions,
            heads.cos_sin,
            pages.k,
            pages.v,
            self._launch.slot_mapping[pages.group],
            q_heads=self._mixers[layer].num_heads,
            q_norm=heads.q_norm,
            k_norm=heads.k_norm,
            eps=heads.eps,
            k_scales=scales.k,
            v_scales=scales.v,
            num_unpacked=self._launch.num_decode,
            backend=self._backend,
        )
        return self.attended(layer, queries, heads.sinks, scales)

    def attended(
        self,
        layer: int,
        queries: RotatedQueries,
        sinks: torch.Tensor | None = None,
        scales: KvScales = NO_SCALES,
    ) -> torch.Tensor:
        """Returns the attention of the launch's queries over this layer's pages: [num_tokens, q_heads, head_dim].

        Padding rows are not written; their content stays in their row and is never read.
        """
        num_decode, mixer = self._launch.num_decode, self._mixers[layer]
        out = torch.empty_like(queries.unpacked)
        options: AttentionOptions = {
            "scale": mixer.scale,
            "window": mixer.window_tokens,
            "softcap": mixer.softcap,
            "sinks": sinks,
            "k_scales": scales.k,
            "v_scales": scales.v,
            "backend": self._backend,
        }
        if num_decode:
            self._attend_decode(layer, queries.unpacked[:num_decode], {**options, "out": out[:num_decode]})
        if self._launch.num_prefill:
            self._attend_prefill(layer, queries.packed, {**options, "out": out[num_decode:]})
        return out

    def _attend_decode(self, layer: int, q: torch.Tensor, options: AttentionOptions) -> None:
        pages = self._pools.layer_pages(layer)
        decode_attention(
            q,
            pages.k,
            pages.v,
            self._launch.block_tables[pages.group][: self._launch.num_decode],
            self._launch.decode_seqlens_k,
            max_seqlen_k=self._launch.max_seqlen_k,
            plan=self._prepared[plan_key(self._mixers[layer])].decode,
            **options,
        )

    def _attend_prefill(self, layer: int, q: torch.Tensor, options: AttentionOptions) -> None:
        pages = self._pools.layer_pages(layer)
        prefill_attention(
            q,
            pages.k,
            pages.v,
            self._launch.block_tables[pages.group][self._launch.num_decode :],
            self._launch.prefill_cu_q,
            self._launch.prefill_cu_k,
            self._launch.max_seqlen_q,
            plan=self._prepared[plan_key(self._mixers[layer])].prefill,
            segment_tokens=self._segment_tokens,
            **options,
        )
