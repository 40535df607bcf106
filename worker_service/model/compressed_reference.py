"""What compressed attention and streams compute, in plain torch: a row's bits depend on nothing but the row."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.route_experts import Routing, RoutingRule

LEAST_SUM = 1e-20


class Collapsed(NamedTuple):
    """One row of each token's streams, x [num_tokens, hidden]; how a branch's output goes to each stream, post fp32
    [num_tokens, n], and how the streams go to each other, comb fp32 [num_tokens, n, n], from the first of both."""

    x: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def collapsed_streams(
    streams: torch.Tensor, mixes: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, eps: float, num_iters: int
) -> Collapsed:
    """Returns what a branch gets of streams [num_tokens, n, hidden], and how its output goes back.

    mixes fp32 [num_tokens, (2 + n) n]: what `fn` makes of the streams' normed row."""
    n = streams.shape[1]
    pre, post, comb = torch.split(mixes, [n, n, n * n], dim=-1)
    pre_base, post_base, comb_base = torch.split(base, [n, n, n * n])
    to_branch = _sigmoid(pre * scale[0] + pre_base) + eps
    from_branch = 2.0 * _sigmoid(post * scale[1] + post_base)
    matrix = (comb * scale[2] + comb_base).view(-1, n, n).softmax(dim=-1) + eps
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(num_iters - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    x = (to_branch.unsqueeze(-1) * streams).sum(dim=1).to(streams.dtype)
    return Collapsed(x, from_branch, matrix)


def expand_streams(out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Returns the streams [num_tokens, n, hidden] behind a branch that made out [num_tokens, hidden]."""
    kept = (comb.to(streams.dtype).unsqueeze(-1) * streams.unsqueeze(2)).sum(dim=1)
    return post.to(streams.dtype).unsqueeze(-1) * out.unsqueeze(1) + kept


def joined_streams(
    streams: torch.Tensor, mixes: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Returns the streams as one row a token, [num_tokens, hidden]; mixes fp32 [num_tokens, n]."""
    weights = _sigmoid(mixes * scale + base) + eps
    return (weights.unsqueeze(-1) * streams).sum(dim=1).to(streams.dtype)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + (-x).exp())


def route_sqrt_softplus(
    logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None, expert_ids: torch.Tensor | None
) -> Routing:
    """Returns the best experts by sqrt(softplus(logit)) + bias, or those given, weighted by their scores."""
    scores = torch.where(logits > 20.0, logits, logits.clamp(max=20.0).exp().log1p()).sqrt()
    if expert_ids is None:
        ranked = scores if bias is None else scores + bias
        expert_ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k].to(torch.int32)
    weights = scores.gather(1, expert_ids.long())
    weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM) * rule.scale
    return Routing(expert_ids.contiguous(), weights)
