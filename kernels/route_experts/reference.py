"""Chooses each token's experts by the rule, and their weights, in plain torch; triton.py does the same on a GPU."""

import torch

from kernels.route_experts.routing import LEAST_SUM, LINEAR_FROM, Routing, RoutingRule, Scoring


def route_experts(
    logits: torch.Tensor, rule: RoutingRule, selection_bias: torch.Tensor | None, routing: Routing, chooses: bool
) -> None:
    """Fills the routing, or where it chooses none the weights of its experts. A place behind the rule's top_k is the
    shared expert's."""
    routing.expert_ids[:, rule.top_k :] = logits.shape[1]
    routing.weights[:, rule.top_k :] = 1.0
    routing = Routing(routing.expert_ids[:, : rule.top_k], routing.weights[:, : rule.top_k])
    logits = logits.float()
    if chooses:
        routing.expert_ids.copy_(_best(_ranked_by(logits, rule, selection_bias), rule))
    ids = routing.expert_ids.long()
    chosen = logits.gather(1, ids)
    if rule.scoring is not Scoring.SOFTMAX:
        weights = _scores(chosen, rule.scoring)
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
    if scoring is Scoring.SOFTMAX:
        return logits.softmax(dim=-1)
    if scoring is Scoring.SQRT_SOFTPLUS:
        return torch.where(logits > LINEAR_FROM, logits, logits.clamp(max=LINEAR_FROM).exp().log1p()).sqrt()
    # torch's own sigmoid gives the last elements of a tensor other bits than those before: a row's must be its own.
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
