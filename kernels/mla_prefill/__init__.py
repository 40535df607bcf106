"""mla_prefill: latent attention of new tokens over keys and values that were projected from latents, ragged.

The keys of a sequence are contiguous. They may be a part of its keys: a call can store its softmax state, and the next
one continues from it.
"""

import math

import torch

from kernels._checks import KV_DTYPES, check_dense, check_lengths, check_out, check_rows, check_tensor, num_sequences
from kernels.attention import check_lse, check_tensor_core_dtype
from kernels.backend import Backend, choose_backend
from kernels.errors import KernelArgumentError
from kernels.mla_prefill import reference
from kernels.mla_prefill.call import MlaPrefillCall
from kernels.mla_prefill.hopper import reason_against
from kernels.mla_prefill.plan import BLOCK, MlaPrefillPlan
from kernels.mla_prefill.state import AttentionState

__all__ = [
    "BLOCK",
    "AttentionState",
    "MlaPrefillPlan",
    "mla_prefill",
    "mla_prefill_part",
]


def mla_prefill(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    *,
    q_offsets: torch.Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    state: AttentionState | None = None,
    plan: MlaPrefillPlan | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Attention of q [num_tokens, heads, nope + rope] over keys k_nope [num_keys, heads, nope] | k_rope, and values v.

    k_rope is [num_keys, rope], one for all heads, or [num_keys, heads, rope]; v is [num_keys, heads, value].
    cu_seqlens_q and cu_seqlens_k int32 [num_seqs + 1]. Key j is visible to query i of its sequence iff
    j <= q_offsets[seq] + i (int32 [num_seqs]; None: keys less queries, so that the last query sees all); every key is,
    if not `causal`. A query that sees no key gets 0, and lse -inf. With `state`, goes on from what mla_prefill_part
    stored for the same queries. A prepared plan is shared by all layers; without one the op makes its own. Returns out
    [num_tokens, heads, value] like q; lse, fp32 [heads, num_tokens], is filled with the natural log-sum-exp.
    """
    factor = _scale(q, scale)
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, q_offsets, causal)
    call = MlaPrefillCall(q, k_nope, k_rope, v, *bounds, factor, state, state is not None, False)
    _check(call, plan)
    check_lse(lse, q)
    tokens, heads, _ = q.shape
    if out is None:
        out = q.new_zeros((tokens, heads, v.shape[2]))
    else:
        check_out(out, (tokens, heads, v.shape[2]), q.dtype, q.device, q=q, k_nope=k_nope, k_rope=k_rope, v=v)
    if lse is not None:
        lse.fill_(float("-inf"))  # rows of no sequence
    _compute(call, backend, plan, out, lse)
    return out


def mla_prefill_part(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    state: AttentionState,
    *,
    resumes: bool,
    q_offsets: torch.Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    plan: MlaPrefillPlan | None = None,
    backend: Backend = Backend.AUTO,
) -> None:
    """Attends to some of the keys and leaves the sums in `state`, going on from what it holds if `resumes`.

    Arguments as in mla_prefill. If every sequence's keys were cut at multiples of BLOCK of its own positions, the
    result has the bits of one call over all of them.
    """
    factor = _scale(q, scale)
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, q_offsets, causal)
    call = MlaPrefillCall(q, k_nope, k_rope, v, *bounds, factor, state, resumes, True)
    _check(call, plan)
    _compute(call, backend, plan, state.acc, None)


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return (q.shape[-1] or 1) ** -0.5 if scale is None else float(scale)


def _compute(
    call: MlaPrefillCall, backend: Backend, plan: MlaPrefillPlan | None, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    if call.q.shape[0] == 0 or call.q.shape[1] == 0 or call.num_seqs == 0 or call.max_seqlen_q == 0:
        return
    route = choose_backend(backend, call.q, lambda: reason_against(call))
    if route is not Backend.REFERENCE:
        check_tensor_core_dtype(call.q)
    if route is Backend.GLUON:
        from kernels.mla_prefill.hopper.launch import launch as launch_gluon

        launch_gluon(call, plan, out, lse)
    elif route is Backend.TRITON:
        from kernels.mla_prefill.triton import check_dims, launch

        check_dims(call)
        launch(call, out, lse)
    else:
        reference.mla_prefill(call, out, lse)


def _check(call: MlaPrefillCall, plan: MlaPrefillPlan | None) -> None:
    """Refuses what no implementation can work with."""
    q, k_nope, k_rope, v = call.q, call.k_nope, call.k_rope, call.v
    check_tensor("q", q, (None, None, None), KV_DTYPES, q.device)
    tokens, heads, dim = q.shape
    check_tensor("k_nope", k_nope, (None, heads, None), (q.dtype,), q.device)
    keys, nope = k_nope.shape[0], k_nope.shape[2]
    if not 0 < nope < dim:
        raise KernelArgumentError(f"k_nope: heads must be narrower than q's {dim}, got {nope}")
    check_tensor("v", v, (keys, heads, None), (q.dtype,), q.device)
    if v.shape[2] == 0:
        raise KernelArgumentError("v: heads must not be empty")
    rope_shape = (keys, dim - nope) if k_rope.dim() == 2 else (keys, heads, dim - nope)
    check_tensor("k_rope", k_rope, rope_shape, (q.dtype,), q.device)
    for name, tensor in (("q", q), ("k_nope", k_nope), ("k_rope", k_rope), ("v", v)):
        check_rows(name, tensor)
    num_seqs = num_sequences(call.cu_seqlens_q, "cu_seqlens_q")
    check_lengths("cu_seqlens_q", call.cu_seqlens_q, num_seqs + 1, q.device)
    check_lengths("cu_seqlens_k", call.cu_seqlens_k, num_seqs + 1, q.device)
    if call.max_seqlen_q < 0:
        raise KernelArgumentError(f"max_seqlen_q: must not be negative, got {call.max_seqlen_q}")
    if not (math.isfinite(call.scale) and call.scale > 0):
        raise KernelArgumentError(f"scale: must be positive and finite, got {call.scale}")
    if call.q_offsets is not None:
        check_lengths("q_offsets", call.q_offsets, num_seqs, q.device)
        if not call.causal:
            raise KernelArgumentError("q_offsets: say which keys are hidden, but causal is False")
    if call.state is not None:
        _check_state(call.state, tokens, v)
    if plan is not None and (num_seqs > plan.max_seqs or tokens > plan.max_tokens):
        raise KernelArgumentError(
            f"plan: holds {plan.max_seqs} sequences of {plan.max_tokens} tokens, got {num_seqs} of {tokens}"
        )


def _check_state(state: AttentionState, tokens: int, v: torch.Tensor) -> None:
    heads, value = v.shape[1:]
    check_dense("state.acc", state.acc, (tokens, heads, value), (torch.float32,), v.device)
    for name, part in (("state.row_max", state.row_max), ("state.row_sum", state.row_sum)):
        check_dense(name, part, (heads, tokens), (torch.float32,), v.device)
