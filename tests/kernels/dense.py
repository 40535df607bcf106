"""Attention as its definition says it, in fp64, one query head at a time, over dense keys.

This is what the references are measured against; it is written to be read, not to be fast.
"""

import torch

from tests.kernels.inputs import PagedCase


def dense_attention(
    case: PagedCase, scale: float | None = None, sinks: torch.Tensor | None = None, softcap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [num_tokens, q_heads, dim], lse [q_heads, num_tokens]) in fp64; a sink is a key whose value is zero."""
    scale = case.q.shape[-1] ** -0.5 if scale is None else scale
    group = case.q.shape[1] // case.keys[0].shape[1]
    outs, lses = [], []
    start = 0
    for (cached, new), keys, values in zip(case.lengths, case.keys, case.values, strict=True):
        q = case.q[start : start + new].double()
        start += new
        visible = torch.zeros(new, cached + new, dtype=torch.bool, device=q.device)
        for i in range(new):
            low = max(0, cached + i - case.window + 1) if case.window else 0
            visible[i, low : cached + i + 1] = True
        for head in range(q.shape[1]):
            scores = q[:, head] @ keys[:, head // group].double().T * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~visible, float("-inf"))
            value = values[:, head // group].double()
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double().expand(new, 1)], dim=1)
                value = torch.cat([value, value.new_zeros(1, value.shape[1])])
            outs.append(torch.softmax(scores, dim=-1) @ value)
            lses.append(torch.logsumexp(scores, dim=-1))
    return _by_head(outs, case.q.shape[1], token_axis=0), _by_head(lses, case.q.shape[1], token_axis=0).T


def _by_head(parts: list[torch.Tensor], heads: int, token_axis: int) -> torch.Tensor:
    """Parts come sequence after sequence, head after head; gives [num_tokens, heads, ...]."""
    per_head = [torch.cat(parts[head::heads], dim=token_axis) for head in range(heads)]
    return torch.stack(per_head, dim=1)
