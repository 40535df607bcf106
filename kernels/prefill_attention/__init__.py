"""prefill_attention: new tokens attend to the cached prefix and to each other, all read from pages.

Does not know which tokens were cached, fetched or just computed: their keys and values were appended before.
"""

from typing import Literal, overload

import torch

from kernels._checks import check_lengths, num_sequences
from kernels.attention import (
    AttentionSpec,
    check_attention,
    check_triton_attention,
    empty_lse,
    output_for,
    query_shape,
)
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.layout import KvLayout
from kernels.prefill_attention import reference
from kernels.prefill_attention.hopper import reason_against
from kernels.prefill_attention.plan import PrefillPlan

__all__ = ["PrefillPlan", "prefill_attention", "prefill_route"]


@overload
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
    return_lse: Literal[False] = False,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor: ...


@overload
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
    return_lse: Literal[True],
    backend: Backend = Backend.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]: ...


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
    return_lse: bool = False,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention, bottom-right aligned: query i of a sequence with c cached tokens stands at position c + i.

    q [num_tokens, q_heads, dim], or packed [kv_heads, num_tokens, group, dim]; cu_seqlens_q, cu_seqlens_k int32
    [num_seqs + 1], k counts cached + new; max_seqlen_q is a bound for the longest sequence's number of queries. A key
    at j is visible to the query at i iff i - window < j <= i (window 0: iff j <= i); pages of keys that no query of
    the batch sees are never read. softcap c turns a scaled score s into c tanh(s / c). sinks fp32 or bf16 [q_heads]
    are logits that take part in each row's softmax, once and whatever the window, and have no value. fp8 pages need
    k_scales and v_scales. plan is this step's, prepared with the same lengths; without one the op makes its own.
    Returns out [num_tokens, q_heads, dim], and with return_lse also the natural log-sum-exp, sink included, fp32
    [q_heads, num_tokens]. A token's result has the same bits however its prompt was cut.
    """
    num_seqs = num_sequences(cu_seqlens_q, "cu_seqlens_q")
    spec = check_attention(
        q, k_pages, v_pages, block_tables, num_seqs, layout, scale, window, sinks, softcap, k_scales, v_scales,
        packed=q.dim() == 4,
    )  # fmt: skip
    check_lengths("cu_seqlens_q", cu_seqlens_q, num_seqs + 1, q.device)
    check_lengths("cu_seqlens_k", cu_seqlens_k, num_seqs + 1, q.device)
    if max_seqlen_q < 0:
        raise KernelArgumentError(f"max_seqlen_q: must not be negative, got {max_seqlen_q}")
    num_tokens, q_heads, dim = query_shape(q)
    if plan is not None:
        plan.check(num_seqs, num_tokens, (q_heads, spec.shape.heads, dim), q.device)
    result = output_for(q, out, k_pages, v_pages, sinks)
    lse = empty_lse(q) if return_lse else None
    if not (num_tokens and num_seqs and max_seqlen_q):
        return result if lse is None else (result, lse)
    where = (q, k_pages, v_pages, block_tables)
    route = _route(backend, q, k_pages, v_pages, spec)
    if route is Backend.GLUON:
        _launch_gluon(where, plan, cu_seqlens_q, cu_seqlens_k, spec, sinks, result, lse)
    elif route is Backend.TRITON:
        check_triton_attention(q, spec)
        from kernels.prefill_attention.triton import launch

        launch(*where, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, spec, sinks, result, lse)
    else:
        reference.prefill_attention(*where, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, spec, sinks, result, lse)
    return result if lse is None else (result, lse)


def _launch_gluon(
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    plan: PrefillPlan | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Over queries, pages and tables, with the caller's plan or one of its own."""
    from kernels.prefill_attention.hopper.kernel import launch

    if plan is None:
        num_tokens, q_heads, dim = out.shape
        plan = PrefillPlan(cu_seqlens_q.shape[0] - 1, num_tokens, q_heads, spec.shape.heads, dim, device=out.device)
        plan.prepare(cu_seqlens_q, cu_seqlens_k)
    launch(*where, plan.records, plan.count, spec, sinks, out, lse)


def prefill_route(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    scale: float | None = None,
    layout: KvLayout = KvLayout.NHD,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> Backend:
    """Which implementation takes such a case; the lengths of a batch never matter."""
    tables = torch.empty(0, 0, dtype=torch.int32, device=q.device)
    spec = check_attention(
        q, k_pages, v_pages, tables, 0, layout, scale, 0, None, 0.0, k_scales, v_scales, packed=q.dim() == 4
    )
    return _route(Backend.AUTO, q, k_pages, v_pages, spec)


def _route(
    backend: Backend, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, spec: AttentionSpec
) -> Backend:
    if backend in (Backend.AUTO, Backend.GLUON):
        reason = reason_against(q, k_pages, v_pages, spec)
        if reason is None:
            return Backend.GLUON
        if backend is Backend.GLUON:
            raise KernelArgumentError(f"backend GLUON: {reason}")
    return Backend.TRITON if uses_triton(backend, q) else Backend.REFERENCE
