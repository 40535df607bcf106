"""mla_prefill in plain torch: one sequence after the other, in fp32.

A sequence's result depends on that sequence alone.
"""

import math

import torch

from kernels.mla_prefill.call import MlaPrefillCall
from kernels.softmax import NO_KEYS

EMPTY = float("-inf")


def mla_prefill(call: MlaPrefillCall, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Fills out, and lse where one is wanted; or the state, where the keys are not all here."""
    q, state = call.q, call.state
    q_bounds, k_bounds = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    heads = q.shape[1]
    for seq in range(len(q_bounds) - 1):
        rows, keys = slice(*q_bounds[seq : seq + 2]), slice(*k_bounds[seq : seq + 2])
        new, length = rows.stop - rows.start, keys.stop - keys.start
        offset = length - new if call.q_offsets is None else int(call.q_offsets[seq])
        rope = (call.k_rope if call.k_rope.dim() == 3 else call.k_rope.unsqueeze(1))[keys]
        k = torch.cat([call.k_nope[keys], rope.expand(length, heads, -1)], dim=-1).float()
        scores = torch.einsum("qhd,khd->hqk", q[rows].float() * call.scale, k)
        if call.causal:
            position = offset + torch.arange(new, device=q.device)
            hidden = torch.arange(length, device=q.device) > position.unsqueeze(1)
            scores = scores.masked_fill(hidden, EMPTY)
        row_max = torch.full(scores.shape[:2], EMPTY, device=q.device)
        row_sum, acc = torch.zeros_like(row_max), torch.zeros((new, heads, call.v.shape[2]), device=q.device)
        if state is not None and call.resumes:
            row_max, row_sum, acc = state.row_max[:, rows] * math.log(2.0), state.row_sum[:, rows], state.acc[rows]
            row_max = torch.where(row_sum == 0.0, EMPTY, row_max)
        if length:
            row_max, row_sum, acc = _add(scores, call.v[keys].float(), row_max, row_sum, acc)
        if state is not None and call.suspends:
            state.acc[rows], state.row_sum[:, rows] = acc, row_sum
            state.row_max[:, rows] = torch.where(row_sum == 0.0, NO_KEYS, row_max / math.log(2.0))
            continue
        out[rows] = (acc / torch.where(row_sum == 0.0, 1.0, row_sum).T.unsqueeze(-1)).to(out.dtype)
        if lse is not None:
            lse[:, rows] = torch.where(row_sum == 0.0, EMPTY, row_max + row_sum.log())


def _add(
    scores: torch.Tensor, values: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor, acc: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The state after keys with these scores [heads, new, keys]."""
    raised = torch.maximum(row_max, scores.amax(dim=-1))
    base = torch.where(raised == EMPTY, 0.0, raised)
    weights, decay = torch.exp(scores - base.unsqueeze(-1)), torch.exp(row_max - base)
    sums = torch.einsum("hqk,khd->qhd", weights, values)
    return raised, row_sum * decay + weights.sum(dim=-1), acc * decay.T.unsqueeze(-1) + sums
