"""grouped_linear on a CPU: for each expert that has rows, oneDNN's product with its packed fp32 weights.

A row's bits do not depend on how many rows the expert has, from LEAST_PACKED_ROWS rows on (see kernels/linear): a
single row is padded. torch's own products do not keep to that: fp32 with two threads, outputs of 768 and a depth of
2,048 gave other bits in 1,272 of 3,705 rows, padded to 16 rows or not, bf16 in 285 with one thread.
"""

from itertools import pairwise

import torch
from torch.nn import functional

from kernels.backend import Backend
from kernels.grouped_linear.plan import ExpertPlan
from kernels.linear import LEAST_PACKED_ROWS, linear, packed_weight

PackedExperts = tuple[torch.Tensor, ...]


def pack(weight: torch.Tensor, backend: Backend) -> torch.Tensor | PackedExperts:
    """Returns the weight of each expert packed, or all as they are where `packed_weight` packs none."""
    packed = tuple(packed_weight(matrix, backend) for matrix in weight)
    return packed if packed and packed[0].is_mkldnn else weight


def grouped_linear(
    x: torch.Tensor, packed: PackedExperts, bias: torch.Tensor | None, plan: ExpertPlan, out: torch.Tensor
) -> None:
    """Fills out."""
    order, pairs_of_row = plan.order.long(), plan.num_pairs // x.shape[0]
    for expert, (begin, end) in enumerate(pairwise(plan.starts.tolist())):
        if begin < end:
            pairs = order[begin:end]
            rows = x[pairs // pairs_of_row]
            missing = max(LEAST_PACKED_ROWS - rows.shape[0], 0)
            product = linear(
                functional.pad(rows, (0, 0, 0, missing)), packed[expert], None if bias is None else bias[expert]
            )
            out[pairs] = product[: end - begin]
