"""Some of the experts of a weight: views, but for one that is dequantised."""

import torch

from kernels.grouped_linear.cpu import PackedExperts
from kernels.grouped_linear.stored import Fp8Experts, Mxfp4Experts, StoredExperts, dequantised
from kernels.grouped_linear.words import ExpertWords, Fp8Words, Mxfp4Words

# A weight [num_experts, N, K] in any form that `grouped_linear` takes.
GroupedWeight = torch.Tensor | PackedExperts | StoredExperts | ExpertWords


def first_experts(weight: GroupedWeight, count: int) -> GroupedWeight:
    """Returns a weight of the first `count` experts."""
    if not isinstance(weight, Fp8Experts | Mxfp4Experts | Fp8Words | Mxfp4Words):
        return weight[:count]
    tensors = {name: part[:count] for name, part in weight._asdict().items() if isinstance(part, torch.Tensor)}
    if isinstance(weight, Fp8Words | Mxfp4Words):
        return weight._replace(**tensors, shape=(count, *weight.shape[1:]))
    return weight._replace(**tensors)


def last_expert(weight: torch.Tensor | StoredExperts, dtype: torch.dtype) -> torch.Tensor:
    """Returns the last expert's weights [N, K]; a stored one's are made in `dtype`."""
    if isinstance(weight, torch.Tensor):
        return weight[-1]
    return dequantised(type(weight)(weight.values[-1:], weight.scales[-1:]), dtype)[0]
