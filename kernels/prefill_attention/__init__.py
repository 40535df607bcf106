"""prefill_attention: new tokens attend to the cached prefix and to each other, all read from pages.

Their keys and values were appended before.
"""

import torch

from kernels._checks import check_block_tables, check_lengths, num_sequences
from kernels.attention import (
    PagedArguments,
    check_attention,
    check_lse,
    check_triton_attention,
    output_for,
    query_shape,
)
from kernels.backend import Backend, choose_backend
from kernels.errors import KernelArgumentError
from kernels.layout import KvLayout
from kernels.prefill_attention import cpu, reference
from kernels.prefill_attention.call import PrefillCall
from kernels.prefill_attention.hopper import reason_against
from kernels.prefill_attention.plan import PrefillPlan
from kernels.prefill_attention.segments import check_segment_tokens, segment_keys

__all__ = ["PrefillPlan", "prefill_attention"]


def prefill_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    *,
    plan: PrefillPlan | None = None,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    layout: KvLayout = KvLayout.NHD,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    segment_tokens: int = 0,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Causal attention, bottom-right aligned: query i of a sequence with c cached tokens is at position c + i.

    q [num_tokens, q_heads, dim], or packed [kv_heads, num_tokens, group, dim]; cu_seqlens_q, cu_seqlens_k int32
    [num_seqs + 1], k counts cached + new; max_seqlen_q is a bound for the longest sequence's number of queries. A key
    at j is visible to the query at i iff i - window < j <= i (window 0: iff j <= i); pages of keys that no query of
    the batch sees are never read. softcap c turns a scaled score s into c tanh(s / c). sinks fp32 or bf16 [q_heads]
    are logits that take part in each row's softmax, once and whatever the window, and have no value. fp8 pages need
    k_scales and v_scales. plan is this step's, prepared with the same lengths; without one the op makes its own.
    segment_tokens, 0 or a multiple of 128 from 4,096 on, has softmax begin anew at its multiples, so that few queries
    behind many keys are work for many programs: on Hopper, without a window and for dim up to 128; elsewhere it changes
    nothing. A plan is made for the same number.
    Returns out [num_tokens, q_heads, dim]; lse, fp32 [q_heads, num_tokens], is filled with the natural log-sum-exp,
    sink included. A token's result has the same bits however its prompt was cut.
    """
    num_seqs = num_sequences(cu_seqlens_q, "cu_seqlens_q")
    given = PagedArguments(q, k_pages, v_pages, layout, scale, k_scales, v_scales, window, softcap, sinks)
    spec = check_attention(given, packed=q.dim() == 4)
    check_block_tables(block_tables, num_seqs, q.device)
    check_lengths("cu_seqlens_q", cu_seqlens_q, num_seqs + 1, q.device)
    check_lengths("cu_seqlens_k", cu_seqlens_k, num_seqs + 1, q.device)
    if max_seqlen_q < 0:
        raise KernelArgumentError(f"max_seqlen_q: must not be negative, got {max_seqlen_q}")
    check_segment_tokens(segment_tokens)
    check_lse(lse, q)
    num_tokens, q_heads, dim = query_shape(q)
    if plan is not None:
        plan.check(num_seqs, num_tokens, (q_heads, spec.shape.heads, dim), q.device, segment_tokens)
    result = output_for(q, out, k_pages, v_pages, sinks)
    if lse is not None:
        lse.fill_(float("-inf"))  # rows of no sequence
    if num_tokens and num_seqs and max_seqlen_q:
        tables = (block_tables, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
        call = PrefillCall(q, k_pages, v_pages, *tables, sinks, spec, segment_tokens)
        _compute(call, backend, plan, result, lse)
    return result


def _compute(
    call: PrefillCall, backend: Backend, plan: PrefillPlan | None, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    q, k_pages, v_pages, spec = call.q, call.k_pages, call.v_pages, call.spec
    route = choose_backend(backend, q, lambda: reason_against(q, k_pages, v_pages, spec))
    if route is Backend.GLUON and segment_keys(call.segment_tokens, spec.shape.dim, spec.window):
        from kernels.prefill_attention.hopper.segment_launch import launch as launch_segmented

        launch_segmented(call, plan, out, lse)
    elif route is Backend.GLUON:
        from kernels.prefill_attention.hopper.launch import launch as launch_gluon

        launch_gluon(call, plan, out, lse)
    elif route is Backend.TRITON:
        check_triton_attention(q, spec)
        from kernels.prefill_attention.triton import launch

        launch(call, out, lse)
    elif backend is Backend.AUTO and cpu.reason_against(call, lse) is None:
        cpu.prefill_attention(call, out)
    else:
        reference.prefill_attention(call, out, lse)
