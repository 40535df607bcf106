"""combine_experts: the weighted sum of what a token's experts returned, in the order in which they were chosen."""

import torch

from kernels._checks import KV_DTYPES, check_dense, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.combine_experts import reference
from kernels.errors import KernelArgumentError

__all__ = ["combine_experts"]


def combine_experts(rows: torch.Tensor, weights: torch.Tensor, *, backend: Backend = Backend.AUTO) -> torch.Tensor:
    """Returns [num_tokens, dim]: weights fp32 [num_tokens, top_k] times rows [num_tokens * top_k, dim], summed.

    In fp32, a token's first expert first, and rounded once to the rows' dtype. The order of choice is a function of the
    token's own logits, so the sum is, too.
    """
    check_dense("weights", weights, (None, None), (torch.float32,), weights.device)
    num_tokens, top_k = weights.shape
    if top_k == 0:
        raise KernelArgumentError("weights: a token must have an expert")
    check_tensor("rows", rows, (num_tokens * top_k, None), KV_DTYPES, weights.device)
    check_rows("rows", rows)
    out = rows.new_empty((num_tokens, rows.shape[1]))
    if out.numel() and uses_triton(backend, rows):
        from kernels.combine_experts.triton import launch

        launch(rows, weights, out)
    else:
        reference.combine_experts(rows, weights, out)
    return out
