"""Gates between a layer's projections, one launch each; a row's bits are its own.

    times_sigmoid     an attention's output, or a shared expert's, times the sigmoid of its gate
    gated_rms_norm    each head of a recurrence normed, then times silu or the sigmoid of its gate
    delta_gates       log decays and betas of the gated delta rule from their logits

All of it in fp32 and rounded once.
"""

import torch

from kernels._checks import KV_DTYPES, check_dense, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.gates import reference

__all__ = ["delta_gates", "gated_rms_norm", "times_sigmoid"]


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor, *, backend: Backend = Backend.AUTO) -> torch.Tensor:
    """Returns x [num_rows, dim] times the sigmoid of gate, [num_rows, dim], or [num_rows, 1] for all of a row.

    Both of one dtype; rows may be slices of wider ones.
    """
    check_tensor("x", x, (None, None), KV_DTYPES, x.device)
    check_rows("x", x)
    check_tensor("gate", gate, (x.shape[0], None), (x.dtype,), x.device)
    check_rows("gate", gate)
    if gate.shape[1] not in (1, x.shape[1]):
        raise KernelArgumentError(f"gate: must have 1 or {x.shape[1]} columns, got {gate.shape[1]}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() and uses_triton(backend, x):
        from kernels.gates.triton import launch_sigmoid

        launch_sigmoid(x, gate, out)
    else:
        reference.times_sigmoid(x, gate, out)
    return out


def gated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate: torch.Tensor,
    *,
    silu: bool = True,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight * silu(gate) as [num_rows, heads * dim]; the mean is of each head.

    Without `silu` the last factor is the sigmoid of the gate.

    x [num_rows, heads, dim], contiguous; weight [dim] in x's dtype or fp32; gate [num_rows, heads * dim] in x's dtype,
    rows may be slices of wider ones.
    """
    check_dense("x", x, (None, None, None), KV_DTYPES, x.device)
    rows, heads, dim = x.shape
    check_dense("weight", weight, (dim,), (x.dtype, torch.float32), x.device)
    check_tensor("gate", gate, (rows, heads * dim), (x.dtype,), x.device)
    check_rows("gate", gate)
    out = torch.empty((rows, heads * dim), dtype=x.dtype, device=x.device)
    if out.numel() and uses_triton(backend, x):
        from kernels.gates.triton import launch_norm

        launch_norm(x, weight, eps, gate, out, silu)
    else:
        reference.gated_rms_norm(x, weight, eps, gate, out, silu)
    return out


def delta_gates(
    decay: torch.Tensor,
    beta: torch.Tensor,
    bias: torch.Tensor,
    a: torch.Tensor,
    *,
    backend: Backend = Backend.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a softplus(decay + bias) and the sigmoid of beta, fp32 and of the shapes of decay and beta.

    decay [num_rows, heads], or [num_rows, heads * dk] with a logit for each key channel of a head, and beta [num_rows,
    heads] of one dtype, rows may be slices of wider ones; bias fp32 of decay's columns, a fp32 [heads].
    """
    check_tensor("decay", decay, (None, None), KV_DTYPES, decay.device)
    check_tensor("beta", beta, (decay.shape[0], None), (decay.dtype,), decay.device)
    columns, heads = decay.shape[1], beta.shape[1]
    if heads == 0 or columns % heads:
        raise KernelArgumentError(f"beta: its heads must divide the {columns} columns of decay, got {heads}")
    for name, logits in (("decay", decay), ("beta", beta)):
        check_rows(name, logits)
    for name, values, size in (("bias", bias, columns), ("a", a, heads)):
        check_dense(name, values, (size,), (torch.float32,), decay.device)
    g, betas = (torch.empty(logits.shape, dtype=torch.float32, device=decay.device) for logits in (decay, beta))
    if g.numel() and uses_triton(backend, decay):
        from kernels.gates.triton import launch_delta

        launch_delta(decay, beta, bias, a, g, betas)
    else:
        reference.delta_gates(decay, beta, bias, a, g, betas)
    return g, betas
