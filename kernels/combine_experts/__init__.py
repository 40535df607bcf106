"""combine_experts: the weighted sum of what a token's experts returned, in the order in which they were chosen."""

import torch

from kernels._checks import KV_DTYPES, check_dense, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.combine_experts import reference
from kernels.errors import KernelArgumentError

__all__ = ["combine_experts"]


def combine_experts(
    rows: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    *,
    fused_shared: bool = False,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns [num_tokens, dim]: weights fp32 [num_tokens, top_k] times rows [num_tokens * top_k, dim], summed.

    In fp32, a token's first expert first, and rounded once to the rows' dtype. The order of choice is a function of the
    token's own logits, so the sum is, too. shared [num_tokens, dim], what the shared expert returned, is added to what
    was rounded; with gate [num_tokens, 1] its product with the gate's sigmoid, rounded first. All of one dtype; rows of
    all three may be slices of wider ones. With `fused_shared` the last of each token's rows is the shared expert's, as
    `route_experts` chose it, and its weight is not read.
    """
    check_dense("weights", weights, (None, None), (torch.float32,), weights.device)
    num_tokens, top_k = weights.shape
    if top_k == 0:
        raise KernelArgumentError("weights: a token must have an expert")
    check_tensor("rows", rows, (num_tokens * top_k, None), KV_DTYPES, weights.device)
    check_rows("rows", rows)
    num_places = top_k
    if fused_shared:
        if shared is not None or top_k == 1:
            raise KernelArgumentError("fused_shared: needs rows of a chosen and of the shared expert, and no `shared`")
        top_k -= 1
        shared = rows[top_k::num_places]
    if gate is not None and shared is None:
        raise KernelArgumentError("gate: needs a shared expert's rows")
    for name, given, columns in (("shared", shared, rows.shape[1]), ("gate", gate, 1)):
        if given is not None:
            check_tensor(name, given, (num_tokens, columns), (rows.dtype,), weights.device)
            check_rows(name, given)
    out = rows.new_empty((num_tokens, rows.shape[1]))
    if out.numel() and uses_triton(backend, rows):
        from kernels.combine_experts.triton import launch

        launch(rows, weights, shared, gate, out, top_k)
    else:
        reference.combine_experts(rows, weights, shared, gate, out, top_k)
    return out
