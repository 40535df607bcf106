"""mla_prefill: latent attention of new tokens over keys and values that were projected from latents, ragged.

Does not know pages: the keys of a sequence lie one behind the other. Nor does it know whether they are all of them: a
call may store where it stands, and the next one goes on from there.
"""

import math
from typing import Literal, overload

import torch

from kernels._checks import (
    KV_DTYPES,
    check_contiguous,
    check_disjoint,
    check_lengths,
    check_rows,
    check_tensor,
    num_sequences,
)
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.mla_prefill import reference
from kernels.mla_prefill.call import PrefillCall
from kernels.mla_prefill.plan import BLOCK, MlaPrefillPlan
from kernels.mla_prefill.state import AttentionState

__all__ = ["BLOCK", "NOPE", "ROPE", "AttentionState", "MlaPrefillPlan", "mla_prefill", "mla_prefill_part"]

NOPE = 128
ROPE = 64


@overload
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
    return_lse: Literal[False] = False,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor: ...


@overload
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
    return_lse: Literal[True],
    backend: Backend = Backend.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]: ...


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
    return_lse: bool = False,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [num_tokens, heads, 128 + 64] over keys k_nope [num_keys, heads, 128] | k_rope, and values v.

    k_rope is [num_keys, 64], one for all heads, or [num_keys, heads, 64]; v is [num_keys, heads, 128]. cu_seqlens_q and
    cu_seqlens_k int32 [num_seqs + 1]. Key j is visible to query i of its sequence iff j <= q_offsets[seq] + i (int32
    [num_seqs]; None: keys less queries, so that the last query sees all); every key is, if not `causal`. A query that
    sees no key gets 0, and lse -inf. With `state`, goes on from what mla_prefill_part stored for the same queries. A
    prepared plan is shared by all layers; without one the op makes its own. Returns out [num_tokens, heads, 128] like
    q, and with return_lse also the natural log-sum-exp, fp32 [heads, num_tokens].
    """
    factor = (NOPE + ROPE) ** -0.5 if scale is None else float(scale)
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, q_offsets, causal)
    call = PrefillCall(q, k_nope, k_rope, v, *bounds, factor, state, state is not None, False)
    _check(call, plan)
    tokens, heads, _ = q.shape
    if out is None:
        out = q.new_zeros((tokens, heads, NOPE))
    else:
        check_tensor("out", out, (tokens, heads, NOPE), (q.dtype,), q.device)
        check_contiguous("out", out)
        for name, source in (("q", q), ("k_nope", k_nope), ("k_rope", k_rope), ("v", v)):
            check_disjoint("out", out, name, source)
    lse = torch.full((heads, tokens), float("-inf"), device=q.device) if return_lse else None
    _attend(call, plan, out, lse, backend)
    return out if lse is None else (out, lse)


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
    factor = (NOPE + ROPE) ** -0.5 if scale is None else float(scale)
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, q_offsets, causal)
    call = PrefillCall(q, k_nope, k_rope, v, *bounds, factor, state, resumes, True)
    _check(call, plan)
    _attend(call, plan, state.acc, None, backend)


def _attend(
    call: PrefillCall, plan: MlaPrefillPlan | None, out: torch.Tensor, lse: torch.Tensor | None, backend: Backend
) -> None:
    """Chooses who computes."""
    q, num_seqs = call.q, call.cu_seqlens_q.shape[0] - 1
    if q.shape[0] == 0 or q.shape[1] == 0 or num_seqs == 0 or call.max_seqlen_q == 0:
        return
    if not uses_triton(backend, q):
        reference.mla_prefill(call, out, lse)
        return
    if q.is_cuda:
        if q.dtype not in KV_DTYPES[:2]:
            raise KernelArgumentError(f"q: dtype must be one of {[str(d) for d in KV_DTYPES[:2]]}, got {q.dtype}")
        from kernels.mla_prefill import hopper

        if hopper.can_attend(call):
            if plan is None:
                plan = MlaPrefillPlan(num_seqs, q.shape[0], device=q.device)
                plan.prepare(call.cu_seqlens_q, call.cu_seqlens_k, call.q_offsets, causal=call.causal)
            hopper.attend(call, plan, out, lse)
            return
    from kernels.mla_prefill.triton import launch

    launch(call, out, lse)


def _check(call: PrefillCall, plan: MlaPrefillPlan | None) -> None:
    """Refuses what no implementation can work with."""
    q, k_nope, k_rope, v = call.q, call.k_nope, call.k_rope, call.v
    check_tensor("q", q, (None, None, NOPE + ROPE), KV_DTYPES, q.device)
    (tokens, heads, _), keys = q.shape, k_nope.shape[0]
    check_tensor("k_nope", k_nope, (keys, heads, NOPE), (q.dtype,), q.device)
    check_tensor("v", v, (keys, heads, NOPE), (q.dtype,), q.device)
    rope_shape = (keys, ROPE) if k_rope.dim() == 2 else (keys, heads, ROPE)
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
        _check_state(call.state, tokens, heads, q.device)
    if plan is not None and (num_seqs > plan.max_seqs or tokens > plan.max_tokens):
        raise KernelArgumentError(
            f"plan: holds {plan.max_seqs} sequences of {plan.max_tokens} tokens, got {num_seqs} of {tokens}"
        )


def _check_state(state: AttentionState, tokens: int, heads: int, device: torch.device) -> None:
    check_tensor("state.acc", state.acc, (tokens, heads, NOPE), (torch.float32,), device)
    check_contiguous("state.acc", state.acc)
    for name, part in (("state.peak", state.peak), ("state.total", state.total)):
        check_tensor(name, part, (heads, tokens), (torch.float32,), device)
        check_contiguous(name, part)
