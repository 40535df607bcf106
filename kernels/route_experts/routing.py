"""A model's rule of routing, as values. The choice itself is made in reference.py, on a GPU in triton.py."""

from enum import Enum
from typing import NamedTuple

import torch

from kernels.errors import KernelArgumentError

# DeepSeek V3 adds this to the sum by which sigmoid scores are divided; a sum of softmax scores is too large to see it.
LEAST_SUM = 1e-20
# From here on fp32 cannot tell softplus(x) from x.
LINEAR_FROM = 20.0


class Scoring(Enum):
    """A logit's score: its softmax over all experts, its sigmoid, or the square root of its softplus."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrtsoftplus"


class RoutingRule(NamedTuple):
    """A model's rule: top_k experts of the top_groups best groups, which are num_groups runs of equal length.

    A group is as good as its best expert (group_best 1), or as the sum of its two best (2).

        Mixtral, gpt-oss, Qwen3-MoE with norm_topk_prob    renormalise
        Qwen3-MoE without, DeepSeek V2 "greedy"            neither; V2 has a scale
        DeepSeek V2 "group_limited_greedy"                 num_groups, top_groups, group_best 1, scale
        DeepSeek V3, GLM-4-MoE                             SIGMOID, renormalise, scale, num_groups, top_groups,
                                                           group_best 2, and a selection bias
        DeepSeek V4                                        SQRT_SOFTPLUS, renormalise, scale, and a selection bias
                                                           or experts that are given by token
    """

    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    renormalise: bool = False  # weights are divided by their sum
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1

    @property
    def adds_scores(self) -> bool:
        """Returns whether groups are ranked by sums of scores: then it is not enough to know the order of experts."""
        return self.num_groups > 1 and self.group_best == 2

    def check(self, num_experts: int) -> None:
        """Raises KernelArgumentError where the rule cannot choose top_k of num_experts."""
        if self.num_groups < 1 or num_experts % self.num_groups:
            raise KernelArgumentError(f"num_groups: {self.num_groups} does not divide {num_experts} experts")
        if not 1 <= self.top_groups <= self.num_groups:
            raise KernelArgumentError(f"top_groups: must be 1 to {self.num_groups}, got {self.top_groups}")
        size = num_experts // self.num_groups
        if self.group_best not in (1, 2) or self.group_best > size:
            raise KernelArgumentError(f"group_best: must be 1 or 2 and at most {size}, got {self.group_best}")
        if not 1 <= self.top_k <= self.top_groups * size:
            raise KernelArgumentError(f"top_k: must be 1 to {self.top_groups * size}, got {self.top_k}")


class Routing(NamedTuple):
    """Each token's experts, best first: expert_ids int32 and weights fp32, both [num_tokens, top_k], or
    one wider with a fused shared expert."""

    expert_ids: torch.Tensor
    weights: torch.Tensor
