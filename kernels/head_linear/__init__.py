"""head_linear: every head's rows times that head's own matrix, such that a row's bits depend on no other row.

Latent attention needs two of them: into the latents' space and out of it.
"""

import torch

from kernels._checks import KV_DTYPES, check_disjoint, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.head_linear import reference

__all__ = ["head_linear"]


def head_linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, backend: Backend = Backend.AUTO
) -> torch.Tensor:
    """out[t, h] = x[t, h] @ weight[h]: x [num_tokens, heads, K], weight [heads, K, N], out [num_tokens, heads, N].

    Any strides whose rows have no gaps, the weight's any at all, so that slices of a checkpoint's matrix and of wider
    rows will do. Returns out.
    """
    check_tensor("x", x, (None, None, None), KV_DTYPES, x.device)
    tokens, heads, depth = x.shape
    check_tensor("weight", weight, (heads, depth, None), (x.dtype,), x.device)
    width = weight.shape[2]
    check_tensor("out", out, (tokens, heads, width), (x.dtype,), x.device)
    if depth == 0:
        raise KernelArgumentError("weight: K must be positive, got 0")
    for name, rows in (("x", x), ("out", out)):
        check_rows(name, rows)
    check_disjoint("out", out, "weight", weight)
    if tokens == 0 or heads == 0 or width == 0:
        return out
    if uses_triton(backend, x):
        from kernels.head_linear.triton import launch

        launch(x, weight, out)
    else:
        reference.head_linear(x, weight, out)
    return out
