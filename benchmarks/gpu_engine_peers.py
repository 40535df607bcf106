"""The attention kernels of other serving engines, where one is installed: vLLM's and SGLang's, both in Triton.

An engine that is not installed is no peer; one whose kernel takes other arguments than these fails when it is timed,
and its row says so. Written against vLLM 0.33 and SGLang 0.5.10.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.measurement import Peer
from tests.kernels.inputs import PagedCase

# What vLLM's backend gives its kernel: up to that many programs a sequence, for that few sequences.
VLLM_SEGMENTS, VLLM_SMALL_GRID = 16, 128
# SGLang chooses its number of splits by load, up to 8 by default; the ends of that range are peers of their own.
SGLANG_SPLITS = (1, 8)


def engine_peers(case: PagedCase, amount: float) -> tuple[Peer, ...]:
    """Both engines' ways to do `case`, a prompt's or a decode step's attention, `amount` of work."""
    decodes = case.max_seqlen_q == 1
    vllm = _vllm_peers(case, amount) if find_spec("vllm") else ()
    if not find_spec("sglang"):
        return vllm
    return (*vllm, *(_sglang_decodes if decodes else _sglang_prefills)(case, amount))


def _vllm_peers(case: PagedCase, amount: float) -> tuple[Peer, ...]:
    work: Any = import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    tokens, heads, dim = case.q.shape
    segments = (tokens, heads, VLLM_SEGMENTS)
    few = case.max_seqlen_q == 1
    call = partial(
        work,
        q=case.q,
        k=case.k_pages,
        v=case.v_pages,
        out=torch.empty_like(case.q),
        cu_seqlens_q=case.cu_seqlens_q,
        max_seqlen_q=case.max_seqlen_q,
        seqused_k=case.seqlens_k,
        max_seqlen_k=int(case.seqlens_k.max()),
        softmax_scale=dim**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=case.block_tables,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        seq_threshold_3D=VLLM_SMALL_GRID // case.k_pages.shape[2] if few else None,
        num_par_softmax_segments=VLLM_SEGMENTS if few else None,
        softmax_segm_output=_floats(*segments, dim) if few else None,
        softmax_segm_max=_floats(*segments) if few else None,
        softmax_segm_expsum=_floats(*segments) if few else None,
    )
    return (Peer("vllm", call, amount),)


def _sglang_prefills(case: PagedCase, amount: float) -> tuple[Peer, ...]:
    """Its kernel takes the new tokens' K and V apart from the prefix's, which it finds token by token."""
    work: Any = import_module("sglang.srt.layers.attention.triton_ops.extend_attention").extend_attention_fwd
    new_lengths = case.cu_seqlens_q.diff()
    prefix_lengths = case.seqlens_k - new_lengths
    slots = _token_slots(case)
    new = [rows[prefix:] for rows, prefix in zip(slots, prefix_lengths.tolist(), strict=True)]
    old = [rows[:prefix] for rows, prefix in zip(slots, prefix_lengths.tolist(), strict=True)]
    k, v = (pages.flatten(0, 1) for pages in (case.k_pages, case.v_pages))
    chosen = torch.cat(new)
    mask = (None, True, None)
    lists = (case.cu_seqlens_q, _sums(prefix_lengths), torch.cat(old))
    arguments = (
        case.q,
        k[chosen],
        v[chosen],
        torch.empty_like(case.q),
        k,
        v,
        *lists,
        *mask,
        case.max_seqlen_q,
        1.0,
        1.0,
    )
    return (Peer("sglang", partial(work, *arguments), amount),)


def _sglang_decodes(case: PagedCase, amount: float) -> tuple[Peer, ...]:
    work: Any = import_module("sglang.srt.layers.attention.triton_ops.decode_attention").decode_attention_fwd
    sequences, heads, dim = case.q.shape
    k, v = (pages.flatten(0, 1) for pages in (case.k_pages, case.v_pages))
    lists = (_sums(case.seqlens_k), torch.cat(_token_slots(case)))

    def peer(splits: int) -> Peer:
        partials = (_floats(sequences, heads, splits, dim), _floats(sequences, heads, splits))
        counts = torch.full((sequences,), splits, dtype=torch.int32, device=case.q.device)
        outputs = (torch.empty_like(case.q), *lists, *partials, counts, splits, dim**-0.5, 1.0, 1.0)
        return Peer(f"sglang_{splits}_splits", partial(work, case.q, k, v, *outputs), amount)

    return tuple(map(peer, SGLANG_SPLITS))


def _token_slots(case: PagedCase) -> list[torch.Tensor]:
    """The slot of every token of each sequence, by position: page id x page size + place."""
    places = torch.arange(case.page_tokens, device=case.q.device)
    slots = (case.block_tables.long().unsqueeze(2) * case.page_tokens + places).flatten(1)
    return [row[:length] for row, length in zip(slots, case.seqlens_k.tolist(), strict=True)]


def _sums(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _floats(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float32, device="cuda")
