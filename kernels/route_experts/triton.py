"""Chooses experts in Triton: one program for one token, one warp, its logits in registers as [groups, experts of one].

Rounds of "the best of those that are left" rather than a sort: top_k is at most ten or so.
"""

import torch
import triton
import triton.language as tl

from kernels.launches import allow_next_launch_and_wait, overlap_options
from kernels.route_experts.routing import LEAST_SUM, LINEAR_FROM, Routing, RoutingRule, Scoring

TINY: tl.constexpr = tl.constexpr(LEAST_SUM)
_LINEAR_FROM: tl.constexpr = tl.constexpr(LINEAR_FROM)
_SIGMOID: tl.constexpr = tl.constexpr(1)
_SQRT_SOFTPLUS: tl.constexpr = tl.constexpr(2)
_SCORINGS = {Scoring.SOFTMAX: 0, Scoring.SIGMOID: _SIGMOID.value, Scoring.SQRT_SOFTPLUS: _SQRT_SOFTPLUS.value}


@triton.jit
def _without_nan(values):
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def _largest(values):
    return tl.max(tl.max(_without_nan(values), 1), 0)


@triton.jit
def _score(logit, SCORING: tl.constexpr):
    """Of a logit by itself."""
    if SCORING == _SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        # log1p: the quotient makes up for what the rounding of 1 + power lost.
        power = tl.exp(tl.minimum(logit, _LINEAR_FROM))
        total = 1.0 + power
        lost = total - 1.0
        softplus = tl.where(lost == 0.0, power, tl.log(total) * (power / tl.where(lost == 0.0, 1.0, lost)))
        score = tl.sqrt_rn(tl.where(logit > _LINEAR_FROM, logit, softplus))
    return score


@triton.jit
def _in_best_groups(ranked, group, member, left, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, END: tl.constexpr):
    """Which of the experts belong to the best groups; of equal groups the lower number is the better one."""
    worth = tl.max(ranked, 1)
    if GROUP_BEST == 2:
        first = tl.min(tl.where(ranked == worth[:, None], member, END), 1)
        worth += tl.max(tl.where(member == first[:, None], float("-inf"), ranked), 1)
    worth = worth[:, None]
    open_groups = tl.max(left.to(tl.int32), 1)[:, None] > 0
    kept = open_groups & False
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(tl.where(open_groups, worth, float("-inf")), 0)
        number = tl.min(tl.where(open_groups & (worth == best[None, :]), group, END), 0)[None, :]
        kept = kept | (group == number)
        open_groups = open_groups & (group != number)
    return left & kept


@triton.jit
def route_rows(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    scale,
    stride_row,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    CHOOSES: tl.constexpr,
    FUSED_SHARED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next_launch_and_wait(OVERLAPS)
    END: tl.constexpr = GROUPS * GROUP_SIZE
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)[:, None]
    member = tl.arange(0, BLOCK_SIZE)[None, :]
    left = (group < GROUPS) & (member < GROUP_SIZE)
    # What only fills the tile up is no expert: its number would be one of the next group's.
    expert = tl.where(left, group * GROUP_SIZE + member, END)
    logit = tl.load(logits_ptr + row * stride_row + expert, mask=left, other=float("-inf")).to(tl.float32)
    ranked = logit
    if HAS_BIAS or GROUP_BEST == 2:
        if SCORING:
            ranked = _score(logit, SCORING)
        else:
            share = tl.exp(logit - _largest(logit))
            ranked = share / tl.sum(tl.sum(share, 1), 0)
        if HAS_BIAS:
            ranked += tl.load(bias_ptr + expert, mask=left, other=0.0)
    ranked = tl.where(left, _without_nan(ranked), float("-inf"))
    if GROUPS > 1:
        left = _in_best_groups(ranked, group, member, left, TOP_GROUPS, GROUP_BEST, END)

    PLACES: tl.constexpr = TOP_K + FUSED_SHARED
    slot = tl.arange(0, BLOCK_K)
    is_slot = slot < TOP_K
    if FUSED_SHARED:
        tl.store(ids_ptr + row * PLACES + TOP_K, END)
        tl.store(weights_ptr + row * PLACES + TOP_K, 1.0)
    if CHOOSES:
        ids = tl.zeros((BLOCK_K,), tl.int32)
        chosen = tl.full((BLOCK_K,), float("-inf"), tl.float32)
        for place in tl.static_range(TOP_K):
            best = _largest(tl.where(left, ranked, float("-inf")))
            choice = tl.min(tl.min(tl.where(left & (ranked == best), expert, END), 1), 0)
            left = left & (expert != choice)
            ids = tl.where(slot == place, choice, ids)
            chosen = tl.where(slot == place, tl.sum(tl.sum(tl.where(expert == choice, logit, 0.0), 1), 0), chosen)
        tl.store(ids_ptr + row * PLACES + slot, ids, mask=is_slot)
    else:
        given = tl.load(ids_ptr + row * PLACES + slot, mask=is_slot, other=0)
        chosen = tl.load(logits_ptr + row * stride_row + given, mask=is_slot, other=float("-inf")).to(tl.float32)
    if SCORING:
        weights = _score(chosen, SCORING)
    elif RENORMALISE:
        # The softmax over the chosen is that over all, divided by the sum of the chosen.
        weights = tl.exp(chosen - tl.max(_without_nan(chosen), 0))
    else:
        highest = _largest(logit)
        weights = tl.exp(chosen - highest) / tl.sum(tl.sum(tl.exp(logit - highest), 1), 0)
    if RENORMALISE:
        weights /= tl.sum(tl.where(is_slot, weights, 0.0), 0) + TINY
    tl.store(weights_ptr + row * PLACES + slot, weights * scale, mask=is_slot)


def launch(
    logits: torch.Tensor, rule: RoutingRule, selection_bias: torch.Tensor | None, routing: Routing, chooses: bool
) -> None:
    """Fills the routing, or where it chooses none the weights of its experts; checked, non-empty arguments."""
    num_tokens, num_experts = logits.shape
    with torch.cuda.device_of(logits):
        route_rows[(num_tokens,)](
            logits,
            logits if selection_bias is None else selection_bias,
            *routing,
            rule.scale,
            logits.stride(0),
            **constants(rule, num_experts, selection_bias is not None, chooses, routing.weights.shape[1] > rule.top_k),
            num_warps=1,
            **overlap_options(logits.device),
        )


def constants(
    rule: RoutingRule, num_experts: int, has_bias: bool, chooses: bool = True, fused_shared: bool = False
) -> dict[str, int]:
    """Returns what the kernel knows of a rule when it is compiled."""
    size = num_experts // rule.num_groups
    return {
        "TOP_K": rule.top_k,
        "SCORING": _SCORINGS[rule.scoring],
        "CHOOSES": chooses,
        "FUSED_SHARED": fused_shared,
        "RENORMALISE": rule.renormalise,
        "HAS_BIAS": has_bias,
        "GROUPS": rule.num_groups,
        "GROUP_SIZE": size,
        "TOP_GROUPS": rule.top_groups,
        "GROUP_BEST": 2 if rule.adds_scores else 1,
        "BLOCK_K": triton.next_power_of_2(rule.top_k),
        "BLOCK_GROUPS": triton.next_power_of_2(rule.num_groups),
        "BLOCK_SIZE": triton.next_power_of_2(size),
    }
