"""What is measured of the ops of expert layers."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.measurement import Maker, Measurement, Peer, difference
from kernels.backend import Backend
from kernels.route_experts import RoutingRule, Scoring, route_experts

EXPERTS = 128
ROUTED_TOKENS = (1, 64, 8192)
TOP_8 = RoutingRule(8, renormalise=True)
GROUPED = RoutingRule(8, Scoring.SIGMOID, True, 2.5, num_groups=8, top_groups=4, group_best=2)


def route(tokens: int, rule: RoutingRule) -> list[Measurement]:
    """Bytes of logits read and of ids and weights written; the peer chooses by torch's softmax and top-k."""
    logits = torch.randn(tokens, EXPERTS, device="cuda")
    bias = torch.randn(EXPERTS, device="cuda") / 10 if rule.adds_scores else None
    call = partial(route_experts, logits, rule, bias)

    def error() -> float:
        got, wanted = call(), call(backend=Backend.REFERENCE)
        # A sigmoid's last bit may put two experts with a bias in another order.
        differing = float((got.expert_ids != wanted.expert_ids).any(dim=1).sum())
        return max(differing / tokens - 1e-3, 0.0) + (0.0 if differing else difference(got.weights, wanted.weights))

    def peer() -> torch.Tensor:
        weights, _ = logits.softmax(dim=-1).topk(rule.top_k)
        return weights / weights.sum(dim=-1, keepdim=True)

    amount = 4e-9 * tokens * (EXPERTS + 2 * rule.top_k)
    name = f"{tokens} x {EXPERTS}, top {rule.top_k}{f' in {rule.num_groups} groups' if rule.adds_scores else ''}"
    peers = () if rule.adds_scores else (Peer("torch", peer, amount),)
    return [Measurement("route_experts", name, "GB/s", amount, call, error, tolerance=1e-5, peers=peers)]


AREAS: dict[str, tuple[Maker, ...]] = {
    "routing": tuple(partial(route, tokens, rule) for tokens in ROUTED_TOKENS for rule in (TOP_8, GROUPED)),
}
