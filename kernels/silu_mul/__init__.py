"""silu_mul: the gated activation of an MLP, silu(gate) * up, from the one GEMM that makes both."""

import torch

from kernels._checks import KV_DTYPES, check_contiguous, check_disjoint, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.silu_mul import reference

__all__ = ["silu_mul"]


def silu_mul(
    gate_up: torch.Tensor, *, out: torch.Tensor | None = None, backend: Backend = Backend.AUTO
) -> torch.Tensor:
    """silu of the first half of each row [num_rows, 2 * dim] times the second half; silu is rounded before it is used.

    Rows may be slices of wider ones. `out` [num_rows, dim], contiguous, in gate_up's dtype.
    """
    check_tensor("gate_up", gate_up, (None, None), KV_DTYPES, gate_up.device)
    check_rows("gate_up", gate_up)
    rows, width = gate_up.shape
    if width % 2:
        raise KernelArgumentError(f"gate_up: rows must have two halves, got {width} columns")
    if out is None:
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    else:
        check_tensor("out", out, (rows, width // 2), (gate_up.dtype,), gate_up.device)
        check_contiguous("out", out)
        check_disjoint("out", out, "gate_up", gate_up)
    if out.numel() and uses_triton(backend, gate_up):
        from kernels.silu_mul.triton import launch

        launch(gate_up, out)
    else:
        reference.silu_mul(gate_up, out)
    return out
