"""decode_attention: the newest tokens of each sequence attend to all of that sequence's pages.

The order in which a sequence is summed is a function of its own length, so its bits never depend on other requests;
which program sums which part depends on the batch.
"""

import torch

from kernels._checks import check_block_tables, check_lengths, num_sequences
from kernels.attention import PagedArguments, check_attention, check_lse, check_triton_attention, output_for
from kernels.backend import Backend, choose_backend
from kernels.decode_attention import cpu, reference
from kernels.decode_attention.call import DecodeCall
from kernels.decode_attention.hopper import reason_against
from kernels.decode_attention.plan_buffers import DecodePlan
from kernels.errors import KernelArgumentError
from kernels.layout import KvLayout

__all__ = ["MAX_Q_TOKENS", "DecodePlan", "decode_attention"]

MAX_Q_TOKENS = 8


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
    lse: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Attention of q [num_tokens, q_heads, dim], the newest tokens of each sequence, over its seqlens_k keys.

    Without cu_seqlens_q each sequence has one token; with it, int32 [num_seqs + 1], up to max_q_tokens, causal among
    themselves. seqlens_k int32 [num_seqs] counts the new tokens, whose keys were appended before; 0 marks a padding
    row (out 0, lse -inf). max_seqlen_k is a host-known bound (None: what a row of the block table holds); it sizes the
    launch, never the result. A key at j is visible to the query at i iff i - window < j <= i (window 0: iff j <= i).
    softcap c turns a scaled score s into c tanh(s / c). sinks fp32 or bf16 [q_heads] are logits that take part in each
    row's softmax, once, and have no value. fp8 pages need k_scales and v_scales. plan is this step's, prepared with
    the same seqlens_k, made for this window or for none; without one the op makes its own.
    Returns out like q. lse, fp32 [q_heads, num_tokens], is filled with the natural log-sum-exp, sink included.
    """
    num_seqs = q.shape[0] if cu_seqlens_q is None else num_sequences(cu_seqlens_q, "cu_seqlens_q")
    spec = check_attention(
        PagedArguments(q, k_pages, v_pages, layout, scale, k_scales, v_scales, window, softcap, sinks)
    )
    check_block_tables(block_tables, num_seqs, q.device)
    bound = block_tables.shape[1] * spec.shape.page_tokens if max_seqlen_k is None else max_seqlen_k
    call = DecodeCall(q, k_pages, v_pages, block_tables, seqlens_k, bound, cu_seqlens_q, max_q_tokens, sinks, spec)
    _check_lengths(call, num_seqs)
    check_lse(lse, q)
    if plan is not None:
        sizes = {"num_seqs": num_seqs, "max_seqlen_k": bound, "max_q_tokens": max_q_tokens}
        plan.check(sizes, (spec.q_heads, spec.shape.heads, spec.shape.dim), window, q.device)
    result = _result(call, out)
    if lse is not None and cu_seqlens_q is not None:
        lse.fill_(float("-inf"))  # rows of no sequence
    if q.shape[0] and num_seqs:
        _compute(call, backend, plan, result, lse)
    return result


def _check_lengths(call: DecodeCall, num_seqs: int) -> None:
    check_lengths("seqlens_k", call.seqlens_k, num_seqs, call.q.device)
    room = call.block_tables.shape[1] * call.spec.shape.page_tokens
    if not 0 <= call.max_seqlen_k <= room:
        raise KernelArgumentError(
            f"max_seqlen_k: must be in 0..{room}, what the block table holds, got {call.max_seqlen_k}"
        )
    if not 1 <= call.max_q_tokens <= MAX_Q_TOKENS:
        raise KernelArgumentError(f"max_q_tokens: must be in 1..{MAX_Q_TOKENS}, got {call.max_q_tokens}")
    if call.cu_seqlens_q is not None:
        check_lengths("cu_seqlens_q", call.cu_seqlens_q, num_seqs + 1, call.q.device)
    elif call.max_q_tokens != 1:
        raise KernelArgumentError(f"max_q_tokens: {call.max_q_tokens} need cu_seqlens_q, got None")


def _result(call: DecodeCall, out: torch.Tensor | None) -> torch.Tensor:
    """Where to write to. A launch is saved where each row is some sequence's and needs no zero before."""
    q = call.q
    if out is None and call.cu_seqlens_q is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return output_for(q, out, call.k_pages, call.v_pages, call.sinks)


def _compute(
    call: DecodeCall, backend: Backend, plan: DecodePlan | None, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    q, k_pages, v_pages, spec = call.q, call.k_pages, call.v_pages, call.spec
    route = choose_backend(backend, q, lambda: reason_against(q, k_pages, v_pages, spec))
    if route is Backend.GLUON:
        from kernels.decode_attention.hopper.launch import launch as launch_gluon

        launch_gluon(call, plan, out, lse)
    elif route is Backend.TRITON:
        check_triton_attention(q, spec)
        from kernels.decode_attention.triton import launch

        launch(call, out, lse)
    elif backend is Backend.AUTO and cpu.reason_against(call, lse) is None:
        cpu.decode_attention(call, out)
    else:
        reference.decode_attention(call, out, lse)
