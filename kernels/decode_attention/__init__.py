"""decode_attention: the newest tokens of each sequence attend to all of that sequence's pages.

Does not know the batch: how a sequence is split is a function of its own length, so its bits never depend on its mates.
"""

from typing import Literal, NamedTuple, overload

import torch

from kernels._checks import check_lengths, num_sequences
from kernels.attention import AttentionSpec, check_attention, check_triton_attention, output_for
from kernels.backend import Backend, uses_triton
from kernels.decode_attention import reference
from kernels.decode_attention.hopper import reason_against
from kernels.decode_attention.plan import DecodePlan
from kernels.errors import KernelArgumentError
from kernels.layout import KvLayout

__all__ = ["MAX_Q_TOKENS", "DecodePlan", "decode_attention", "decode_route"]

MAX_Q_TOKENS = 8


@overload
def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    max_seqlen_k: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_tokens: int = 1,
    plan: DecodePlan | None = None,
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
def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    max_seqlen_k: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_tokens: int = 1,
    plan: DecodePlan | None = None,
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


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    max_seqlen_k: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_tokens: int = 1,
    plan: DecodePlan | None = None,
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
    """Attention of q [num_tokens, q_heads, dim], the newest tokens of each sequence, over its seqlens_k keys.

    Without cu_seqlens_q each sequence has one token; with it, int32 [num_seqs + 1], up to max_q_tokens, causal among
    themselves. seqlens_k int32 [num_seqs] counts the new tokens, whose keys were appended before; 0 marks a padding
    row (out 0, lse -inf). max_seqlen_k is a host-known bound (None: what a row of the block table holds); it sizes the
    launch, never the result. A key at j is visible to the query at i iff i - window < j <= i (window 0: iff j <= i).
    softcap c turns a scaled score s into c tanh(s / c). sinks fp32 or bf16 [q_heads] are logits that take part in each
    row's softmax, once, and have no value. fp8 pages need k_scales and v_scales. plan is this step's, prepared with
    the same seqlens_k; without one the op makes its own.
    Returns out like q, and with return_lse also the natural log-sum-exp, sink included, fp32 [q_heads, num_tokens].
    """
    num_seqs = q.shape[0] if cu_seqlens_q is None else num_sequences(cu_seqlens_q, "cu_seqlens_q")
    spec = check_attention(
        q, k_pages, v_pages, block_tables, num_seqs, layout, scale, window, sinks, softcap, k_scales, v_scales
    )
    lengths = _check_step(seqlens_k, max_seqlen_k, cu_seqlens_q, max_q_tokens, num_seqs, block_tables, spec, q.device)
    if plan is not None:
        sizes = {"num_seqs": num_seqs, "max_seqlen_k": lengths.max_seqlen_k, "max_q_tokens": max_q_tokens}
        plan.check(sizes, (spec.q_heads, spec.shape.heads, spec.shape.dim), q.device)
    result = _result(q, out, k_pages, v_pages, sinks, every_row=cu_seqlens_q is None)
    lse = _lse(q, every_row=cu_seqlens_q is None) if return_lse else None
    if q.shape[0] and num_seqs:
        route = _route(backend, q, k_pages, v_pages, spec)
        _compute(route, q, k_pages, v_pages, block_tables, lengths, plan, spec, sinks, result, lse)
    return result if lse is None else (result, lse)


def decode_route(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    scale: float | None = None,
    layout: KvLayout = KvLayout.NHD,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> Backend:
    """Which implementation takes such a case; lengths and numbers of sequences and tokens never matter."""
    tables = torch.empty(0, 0, dtype=torch.int32, device=q.device)
    spec = check_attention(q, k_pages, v_pages, tables, 0, layout, scale, 0, None, 0.0, k_scales, v_scales)
    return _route(Backend.AUTO, q, k_pages, v_pages, spec)


class StepLengths(NamedTuple):
    """How long what is: on the device, and as bounds that the host knows."""

    seqlens_k: torch.Tensor
    max_seqlen_k: int
    cu_seqlens_q: torch.Tensor | None
    max_q_tokens: int


def _check_step(
    seqlens_k: torch.Tensor,
    max_seqlen_k: int | None,
    cu_seqlens_q: torch.Tensor | None,
    max_q_tokens: int,
    num_seqs: int,
    block_tables: torch.Tensor,
    spec: AttentionSpec,
    device: torch.device,
) -> StepLengths:
    check_lengths("seqlens_k", seqlens_k, num_seqs, device)
    room = block_tables.shape[1] * spec.shape.page_tokens
    bound = room if max_seqlen_k is None else max_seqlen_k
    if not 0 <= bound <= room:
        raise KernelArgumentError(f"max_seqlen_k: must be in 0..{room}, what the block table holds, got {bound}")
    if not 1 <= max_q_tokens <= MAX_Q_TOKENS:
        raise KernelArgumentError(f"max_q_tokens: must be in 1..{MAX_Q_TOKENS}, got {max_q_tokens}")
    if cu_seqlens_q is not None:
        check_lengths("cu_seqlens_q", cu_seqlens_q, num_seqs + 1, device)
    elif max_q_tokens != 1:
        raise KernelArgumentError(f"max_q_tokens: {max_q_tokens} need cu_seqlens_q, got None")
    return StepLengths(seqlens_k, bound, cu_seqlens_q, max_q_tokens)


def _result(
    q: torch.Tensor,
    out: torch.Tensor | None,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    sinks: torch.Tensor | None,
    every_row: bool,
) -> torch.Tensor:
    """Where to write to. A launch is saved where each row is some sequence's and needs no zero before."""
    if out is None and every_row:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return output_for(q, out, k_pages, v_pages, sinks)


def _lse(q: torch.Tensor, every_row: bool) -> torch.Tensor:
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    return lse if every_row else lse.fill_(float("-inf"))


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


def _compute(
    route: Backend,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: StepLengths,
    plan: DecodePlan | None,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    seqlens_k, max_seqlen_k, cu_seqlens_q, max_q_tokens = lengths
    inputs = (q, k_pages, v_pages, block_tables, seqlens_k)
    if route is Backend.GLUON:
        from kernels.decode_attention.hopper.kernel import launch as launch_gluon

        if plan is None:
            sizes = (seqlens_k.shape[0], max_seqlen_k, spec.q_heads, spec.shape.heads, spec.shape.dim)
            plan = DecodePlan(*sizes, max_q_tokens=max_q_tokens, device=q.device)
            plan.prepare(seqlens_k)
        launch_gluon(*inputs, cu_seqlens_q, max_q_tokens, plan, spec, sinks, out, lse)
    elif route is Backend.TRITON:
        check_triton_attention(q, spec)
        from kernels.decode_attention.triton import launch

        launch(*inputs, cu_seqlens_q, max_seqlen_k, max_q_tokens, spec, sinks, out, lse)
    else:
        reference.decode_attention(*inputs, cu_seqlens_q, max_seqlen_k, max_q_tokens, spec, sinks, out, lse)
