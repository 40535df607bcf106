"""route_experts in plain torch."""

import torch

from kernels.route_experts.rule import LEAST_SUM, Routing, RoutingRule, Scoring


def route_experts(
    logits: torch.Tensor, rule: RoutingRule, selection_bias: torch.Tensor | None, routing: Routing
) -> None:
    """Fills the routing."""
    logits = logits.float()
    ids = _best(_ranked_by(logits, rule, selection_bias), rule)
    routing.expert_ids.copy_(ids)
    chosen = logits.gather(1, ids)
    if rule.scoring is Scoring.SIGMOID:
        weights = _sigmoid(chosen)
    elif rule.renormalise:
        weights = (chosen - _without_nan(chosen).amax(dim=-1, keepdim=True)).exp()
    else:
        weights = logits.softmax(dim=-1).gather(1, ids)
    if rule.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    routing.weights.copy_(weights * rule.scale)


def _ranked_by(logits: torch.Tensor, rule: RoutingRule, selection_bias: torch.Tensor | None) -> torch.Tensor:
    """What experts are ranked by, [num_tokens, num_experts]: no NaN."""
    by_logits = selection_bias is None and not rule.adds_scores
    scores = logits if by_logits else _scores(logits, rule.scoring)
    if selection_bias is not None:
        scores = scores + selection_bias
    return _without_nan(scores)


def _scores(logits: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    return logits.softmax(dim=-1) if scoring is Scoring.SOFTMAX else _sigmoid(logits)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """torch's own gives the last elements of a tensor other bits than those before, so a row's would not be its own."""
    return 1.0 / (1.0 + (-logits).exp())


def _without_nan(values: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(values.isnan(), -torch.inf)


def _best(ranked: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Ids int64 [num_tokens, top_k] of the best experts of the best groups: stable sorts, so equals stay in order."""
    if rule.num_groups == 1:
        return ranked.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    groups = ranked.view(ranked.shape[0], rule.num_groups, -1)
    worth = groups.sort(dim=-1, descending=True).values[..., : rule.group_best].sum(dim=-1)
    top = worth.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups].sort(dim=-1).values
    size = groups.shape[2]
    members = (top.unsqueeze(2) * size + torch.arange(size, device=top.device)).flatten(1)
    order = ranked.gather(1, members).sort(dim=-1, descending=True, stable=True).indices
    return torch.gather(members, 1, order[:, : rule.top_k])
