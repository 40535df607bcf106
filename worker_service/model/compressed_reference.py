"""What compressed attention and streams compute, in plain torch: a row's bits depend on nothing but the row."""

from __future__ import annotations

import torch

from kernels.route_experts import Routing, RoutingRule

LEAST_SUM = 1e-20


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
