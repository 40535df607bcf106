"""rotate_tail: rotation of the last elements of each head, neighbours with each other, and its inverse.

DeepSeek V4 turns queries and keys so, and turns what attention made of keys back.
"""

import torch

from kernels._checks import INDEX_DTYPES, KV_DTYPES, check_dense, check_head_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.rotate_tail import reference

__all__ = ["rotate_tail"]


def rotate_tail(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    inverse: bool = False,
    backend: Backend = Backend.AUTO,
) -> None:
    """Turns the last `turned` elements of each head of x [num_tokens, heads, dim] in place, in fp32 and rounded once.

    Elements 2 i and 2 i + 1 of these turn with each other, `inverse` by the negated angle. Rows of x may be slices of
    wider ones; positions int32 or int64 [num_tokens]; cos_sin fp32 [max_positions, 2, turned / 2], cosines before
    sines.
    """
    check_tensor("x", x, (None, None, None), KV_DTYPES, x.device)
    check_head_rows("x", x)
    check_dense("cos_sin", cos_sin, (None, 2, None), (torch.float32,), x.device)
    dim, turned = x.shape[2], 2 * cos_sin.shape[2]
    if not 0 < turned <= dim:
        raise KernelArgumentError(f"cos_sin: must turn 2 to {dim} elements, got {turned}")
    check_dense("positions", positions, (x.shape[0],), INDEX_DTYPES, x.device)
    if x.numel() == 0:
        return
    if uses_triton(backend, x):
        from kernels.rotate_tail.triton import launch

        launch(x, positions, cos_sin, inverse)
    else:
        reference.rotate_tail(x, positions, cos_sin, inverse)
