"""head_linear: every head's rows times that head's own matrix, such that a row's bits depend on no other row.

Latent attention needs two of them: into the latents' space and out of it.
"""

import torch

from kernels._checks import KV_DTYPES, check_disjoint, check_rows, check_tensor
from kernels.backend import Backend, choose_backend
from kernels.errors import KernelArgumentError
from kernels.head_linear import reference
from kernels.head_linear.hopper import reason_against

__all__ = ["head_linear"]


def head_linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, backend: Backend = Backend.AUTO
) -> torch.Tensor:
    """out[t, h, :N] = x[t, h, :K] @ weight[h], and out[t, h, N:] = x[t, h, K:]: what rows carry behind K is copied.

    x [num_tokens, heads, K + any], weight [heads, K, N], out [num_tokens, heads, N + the same]. Any strides whose rows
    have no gaps, the weight's any at all, so that slices of a checkpoint's matrix and of wider rows will do. Returns
    out.
    """
    check_tensor("x", x, (None, None, None), KV_DTYPES, x.device)
    tokens, heads, width = x.shape
    check_tensor("weight", weight, (heads, None, None), (x.dtype,), x.device)
    depth, num_outputs = weight.shape[1:]
    if not 0 < depth <= width:
        raise KernelArgumentError(f"weight: K must be 1 to {width}, as wide as x, got {depth}")
    check_tensor("out", out, (tokens, heads, num_outputs + width - depth), (x.dtype,), x.device)
    for name, rows in (("x", x), ("out", out)):
        check_rows(name, rows)
    check_disjoint("out", out, "weight", weight)
    if out.numel() == 0:
        return out
    route = choose_backend(backend, x, lambda: reason_against(x, weight))
    if route is Backend.GLUON:
        from kernels.head_linear.hopper.launch import launch as launch_gluon

        launch_gluon(x, weight, out)
    elif route is Backend.TRITON:
        from kernels.head_linear.triton import launch

        launch(x, weight, out)
    else:
        reference.head_linear(x, weight, out)
    return out
