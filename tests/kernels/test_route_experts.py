"""route_experts: the experts and weights of transformers' routers, ties by expert id, a row's bits its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from kernels.errors import KernelArgumentError
from kernels.route_experts import Routing, RoutingRule, Scoring, route_experts
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.target import Target

V3 = RoutingRule(6, Scoring.SIGMOID, renormalise=True, scale=2.5, num_groups=5, top_groups=2, group_best=2)
V2 = RoutingRule(5, scale=16.0, num_groups=5, top_groups=3)
RULES = {
    "softmax": RoutingRule(8),
    "softmax, renormalised": RoutingRule(4, renormalise=True),
    "one": RoutingRule(1, Scoring.SIGMOID),
    "groups by their best": V2,
    "groups by sums": V3,
    "sums of softmax scores": V3._replace(scoring=Scoring.SOFTMAX, renormalise=False),
    "square roots of softplus": RoutingRule(6, Scoring.SQRT_SOFTPLUS, renormalise=True, scale=1.5),
    "all experts": RoutingRule(20, Scoring.SIGMOID, renormalise=True),
}


def logits_of(rows: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Multiples of a quarter: every row has ties."""
    drawn = torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))
    return (drawn * 6).round() / 4


def by_hand(row: list[float], rule: RoutingRule, bias: list[float]) -> tuple[list[int], list[float]]:
    """One token's experts and weights, by loops over Python numbers."""
    exps = [torch.tensor(value, dtype=torch.float64).exp().item() for value in row]
    of_power = {
        Scoring.SIGMOID: lambda power: power / (1 + power),
        Scoring.SOFTMAX: lambda power: power / sum(exps),
        Scoring.SQRT_SOFTPLUS: lambda power: math.log1p(power) ** 0.5,
    }
    scores = [of_power[rule.scoring](power) for power in exps]
    ranked = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(row) // rule.num_groups
    groups = [range(group * size, (group + 1) * size) for group in range(rule.num_groups)]
    worth = [sum(sorted((ranked[e] for e in group), reverse=True)[: rule.group_best]) for group in groups]
    best_groups = sorted(range(rule.num_groups), key=lambda group: (-worth[group], group))[: rule.top_groups]
    allowed = [expert for group in best_groups for expert in groups[group]]
    chosen = sorted(allowed, key=lambda expert: (-ranked[expert], expert))[: rule.top_k]
    total = sum(scores[expert] for expert in chosen) if rule.renormalise else 1.0
    return chosen, [scores[expert] / total * rule.scale for expert in chosen]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_rule_by_hand(target: Target, name: str, has_bias: bool) -> None:
    """The biases are multiples of 1/8: sums with equal scores tie as well."""
    logits, bias = logits_of(9, 20), logits_of(1, 20, seed=1)[0] / 2
    given = bias if has_bias else None
    got = routed(logits, RULES[name], given, target)
    for row, ids, weights in zip(logits, got.expert_ids, got.weights, strict=True):
        wanted_ids, wanted = by_hand(row.tolist(), RULES[name], bias.tolist() if has_bias else [0.0] * 20)
        assert ids.tolist() == wanted_ids
        torch.testing.assert_close(weights.cpu(), torch.tensor(wanted), rtol=2e-6, atol=0.0)


def routed(logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None, target: Target) -> Routing:
    given = None if bias is None else bias.to(target.device)
    return route_experts(logits.to(target.device), rule, given, backend=target.backend)


@pytest.mark.parametrize(("experts", "rule"), [(128, RULES["softmax"]), (160, V2), (40, V3), (7, RoutingRule(3))])
def test_a_row_has_its_own_bits(target: Target, experts: int, rule: RoutingRule) -> None:
    logits = torch.randn(33, experts, generator=torch.Generator().manual_seed(3))
    bias = logits_of(1, experts, seed=1)[0]
    together = routed(logits, rule, bias, target)
    for first, count in ((0, 1), (5, 1), (7, 20), (32, 1)):
        alone = routed(logits[first : first + count], rule, bias, target)
        for got, wanted in zip(alone, together, strict=True):
            assert_same_bits(got, wanted[first : first + count])


@pytest.mark.parametrize("name", RULES)
def test_a_fused_shared_expert_is_the_last_of_each_token(target: Target, name: str) -> None:
    """The others and their weights have the bits that they have without it."""
    logits, rule = logits_of(9, 20).to(target.device), RULES[name]
    alone = route_experts(logits, rule, backend=target.backend)
    got = route_experts(logits, rule, fused_shared=True, backend=target.backend)
    assert got.expert_ids[:, -1].tolist() == [20] * 9 and got.weights[:, -1].tolist() == [1.0] * 9
    assert_same_bits(got.expert_ids[:, :-1].contiguous(), alone.expert_ids)
    assert_same_bits(got.weights[:, :-1].contiguous(), alone.weights)


def test_a_fused_shared_expert_is_chosen_with_others() -> None:
    ids = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match="fused_shared: experts that are given are no choice"):
        route_experts(torch.zeros(3, 4), RoutingRule(2), expert_ids=ids, fused_shared=True)


@pytest.mark.parametrize("name", RULES)
def test_given_experts_are_weighted_by_their_scores(target: Target, name: str) -> None:
    """Those that the rule chooses get the same weights when they are given, in any order; logits may be extreme."""
    logits, rule = logits_of(5, 20) * 1.0, RULES[name]
    logits[3, :10], logits[4] = -40.0, 50.0
    chosen = routed(logits, rule, None, target)
    turned = chosen.expert_ids.flip(1).contiguous()
    got = route_experts(logits.to(target.device), rule, expert_ids=turned, backend=target.backend)
    assert_same_bits(got.expert_ids, turned)
    torch.testing.assert_close(got.weights.flip(1), chosen.weights, rtol=2e-6, atol=0.0)


def test_small_scores_keep_their_digits(target: Target) -> None:
    """Given experts may have logits at which 1 + exp is 1 in fp32."""
    logits = torch.tensor([[-30.0, -20.0, -1.0, 25.0]])
    ids = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    rule = RoutingRule(4, Scoring.SQRT_SOFTPLUS)
    got = route_experts(logits.to(target.device), rule, expert_ids=ids.to(target.device), backend=target.backend)
    wanted = logits.double().exp().log1p().sqrt()
    torch.testing.assert_close(got.weights.cpu().double(), wanted, rtol=2e-6, atol=0.0)


def test_equal_logits_go_by_id(target: Target) -> None:
    got = routed(torch.zeros(2, 20), V2, None, target)
    assert got.expert_ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    # Saturated sigmoids are equal, their logits are not.
    logits = torch.full((1, 16), 60.0)
    logits[0, 11] = 70.0
    assert routed(logits, RoutingRule(2, Scoring.SIGMOID), None, target).expert_ids.tolist() == [[11, 0]]


def test_slices_of_16_bit_rows(target: Target) -> None:
    wide = logits_of(4, 60).to(torch.bfloat16)
    got = routed(wide[:, 20:40], RULES["softmax"], None, target)
    wanted = routed(wide[:, 20:40].float().contiguous(), RULES["softmax"], None, target)
    assert_same_bits(got.expert_ids, wanted.expert_ids)
    assert_same_bits(got.weights, wanted.weights)


@pytest.mark.parametrize("name", RULES)
def test_rows_without_numbers_get_experts_all_the_same(target: Target, name: str) -> None:
    """A buffer's unused rows may hold anything; what reads the ids must find experts there."""
    logits = logits_of(3, 20)
    logits[0], logits[1], logits[2, ::3] = float("nan"), float("-inf"), float("nan")
    for bias in (None, torch.zeros(20)):
        for ids in routed(logits, RULES[name], bias, target).expert_ids.tolist():
            assert len(set(ids)) == len(ids) and min(ids) >= 0 and max(ids) < 20


def test_no_tokens(target: Target) -> None:
    got = routed(torch.empty(0, 20), V2, None, target)
    assert got.expert_ids.shape == got.weights.shape == (0, 5)


X, BIAS = logits_of(3, 20), torch.zeros(20)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"logits": X[0]}, r"logits: shape must be \[any, any\], got \[20\]"),
    ({"logits": X.T}, "logits: the last axis must have stride 1"),
    ({"logits": X.long()}, "logits: dtype must be one of"),
    ({"logits": X[:, :0]}, "logits: must be of 1 to 1024 experts, got 0"),
    ({"selection_bias": BIAS[:5]}, r"selection_bias: shape must be \[20\], got \[5\]"),
    ({"selection_bias": BIAS.half()}, "selection_bias: dtype must be one of"),
    ({"expert_ids": torch.zeros(3, 2, dtype=torch.int32)}, r"expert_ids: shape must be \[3, 8\], got \[3, 2\]"),
    ({"expert_ids": torch.zeros(3, 8, dtype=torch.int64)}, "expert_ids: dtype must be one of"),
    ({"rule": RoutingRule(21)}, "top_k: must be 1 to 20, got 21"),
    ({"rule": RoutingRule(0)}, "top_k: must be 1 to 20, got 0"),
    ({"rule": RoutingRule(2, num_groups=3)}, "num_groups: 3 does not divide 20 experts"),
    ({"rule": RoutingRule(2, num_groups=4, top_groups=5)}, "top_groups: must be 1 to 4, got 5"),
    ({"rule": RoutingRule(6, num_groups=4, top_groups=1)}, "top_k: must be 1 to 5, got 6"),
    ({"rule": RoutingRule(2, num_groups=20, group_best=2)}, "group_best: must be 1 or 2 and at most 1, got 2"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        route_experts(**{"logits": X, "rule": RULES["softmax"], "selection_bias": BIAS, **change})


HIDDEN = 16


def router(family: str, name: str, config: type, **fields: Any) -> nn.Module:
    """transformers' router of a family, with weights that give logits of about 1 and a bias where it has one."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    made: nn.Module = getattr(module, name)(config(hidden_size=HIDDEN, num_attention_heads=2, **fields)).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in (*made.parameters(), *made.buffers()):
        parameter.data = torch.randn(parameter.shape, generator=generator) / HIDDEN**0.5
    return made


def routers() -> dict[str, tuple[nn.Module, RoutingRule]]:
    configs = pytest.importorskip("transformers")
    grouped: dict[str, Any] = {"num_experts_per_tok": 6, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    eight: dict[str, Any] = {"num_experts_per_tok": 8, "num_experts": 32}
    by_sums = RoutingRule(6, Scoring.SIGMOID, True, 2.5, num_groups=4, top_groups=2, group_best=2)
    glm, v3, v2 = configs.Glm4MoeConfig, configs.DeepseekV3Config, configs.DeepseekV2Config
    mixtral, gpt_oss, qwen = configs.MixtralConfig, configs.GptOssConfig, configs.Qwen3MoeConfig
    return {
        "mixtral": (
            router("mixtral", "MixtralTopKRouter", mixtral, num_local_experts=8, num_experts_per_tok=2),
            RoutingRule(2, renormalise=True),
        ),
        "gpt_oss": (
            router("gpt_oss", "GptOssTopKRouter", gpt_oss, num_local_experts=32, num_experts_per_tok=4),
            RoutingRule(4, renormalise=True),
        ),
        "qwen3_moe": (router("qwen3_moe", "Qwen3MoeTopKRouter", qwen, norm_topk_prob=False, **eight), RoutingRule(8)),
        "qwen3_moe, norm": (
            router("qwen3_moe", "Qwen3MoeTopKRouter", qwen, norm_topk_prob=True, **eight),
            RoutingRule(8, renormalise=True),
        ),
        "glm4_moe": (router("glm4_moe", "Glm4MoeTopkRouter", glm, n_routed_experts=32, **grouped), by_sums),
        "deepseek_v3": (router("deepseek_v3", "DeepseekV3TopkRouter", v3, n_routed_experts=40, **grouped), by_sums),
        "deepseek_v2": (
            router(
                "deepseek_v2", "DeepseekV2TopkRouter", v2, n_routed_experts=40, topk_method="group_limited_greedy",
                **grouped,
            ),
            RoutingRule(6, scale=2.5, num_groups=4, top_groups=2),
        ),
        "deepseek_v2, greedy": (
            router("deepseek_v2", "DeepseekV2TopkRouter", v2, n_routed_experts=40, topk_method="greedy", **grouped),
            RoutingRule(6, scale=2.5),
        ),
    }  # fmt: skip


FAMILIES = (
    "mixtral",
    "gpt_oss",
    "qwen3_moe",
    "qwen3_moe, norm",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v2",
    "deepseek_v2, greedy",
)


@pytest.mark.skipif(INTERPRETING, reason="the reference against transformers; the kernel is held against the reference")
@pytest.mark.parametrize("family", FAMILIES)
def test_against_transformers(family: str) -> None:
    """Those that have equal scores are drawn by chance there: the hidden states are not rounded, so nothing ties."""
    module, rule = routers()[family]
    hidden = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        logits, weights, ids = module(hidden)
    bias = getattr(module, "e_score_correction_bias", None)
    got = route_experts(logits, rule, bias)
    order, wanted_order = got.expert_ids.argsort(dim=1), ids.argsort(dim=1)
    assert torch.equal(got.expert_ids.gather(1, order).long(), ids.gather(1, wanted_order))
    torch.testing.assert_close(got.weights.gather(1, order), weights.gather(1, wanted_order), rtol=1e-6, atol=0.0)
