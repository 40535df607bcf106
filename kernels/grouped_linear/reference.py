"""The truth for grouped_linear: products in fp32 (fp64 for fp32 inputs) of one row at a time, rounded once.

One row, because a product's last bits depend on how many rows it has.
"""

from itertools import pairwise

import torch

from kernels.grouped_linear.plan import ExpertPlan
from kernels.grouped_linear.stored import StoredExperts, expert_values


def plan_experts(expert_ids: torch.Tensor, plan: ExpertPlan) -> None:
    """Fills the plan; waits for the device where the ids are not on the CPU."""
    ids = expert_ids.flatten().long()
    is_expert = (ids >= 0) & (ids < plan.num_experts)
    plan.order.copy_(ids.masked_fill(~is_expert, plan.num_experts).argsort(stable=True))
    counts = ids[is_expert].bincount(minlength=plan.num_experts)
    plan.starts[0] = 0
    plan.starts[1:] = counts.cumsum(0)
    rows, starts = plan.tile_rows, plan.starts.tolist()
    tiles = [
        (expert, first) for expert, (begin, end) in enumerate(pairwise(starts)) for first in range(begin, end, rows)
    ]
    plan.num_tiles[0] = len(tiles)
    plan.tiles[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32).view(-1, 2)


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor | StoredExperts,
    bias: torch.Tensor | None,
    plan: ExpertPlan,
    out: torch.Tensor,
) -> None:
    """Fills out. A stored weight is rounded to x's dtype first."""
    wide = torch.float64 if x.dtype is torch.float32 else torch.float32
    pairs_of_row, order = plan.num_pairs // x.shape[0], plan.order.tolist()
    for expert, (begin, end) in enumerate(pairwise(plan.starts.tolist())):
        if begin == end:
            continue
        matrix = weight[expert] if isinstance(weight, torch.Tensor) else expert_values(weight, expert).to(x.dtype)
        matrix = matrix.to(wide)
        for pair in order[begin:end]:
            product = matrix @ x[pair // pairs_of_row].to(wide)
            out[pair] = product if bias is None else product + bias[expert].to(wide)
