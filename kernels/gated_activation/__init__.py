"""The gated activations of MLPs, f(gate) * up, from the one GEMM that makes both; a row's bits are its own.

`silu_mul` is that of Llama, Qwen, Mistral, DeepSeek and GLM, with a limit DeepSeek V4's, `gelu_mul` Gemma's,
`clamped_swiglu` that of gpt-oss.
"""

import math

import torch

from kernels._checks import KV_DTYPES, check_rows, check_tensor, checked_out
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.gated_activation import reference
from kernels.gated_activation.gate import Gate, GateKind

__all__ = ["clamped_swiglu", "gelu_mul", "silu_mul"]

_GELU = Gate(GateKind.GELU_TANH)


def silu_mul(
    gate_up: torch.Tensor,
    *,
    limit: float = math.inf,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """silu of the first half of each row [num_rows, 2 * dim] times the second half; silu is rounded before it is used.

    Before that the first half is cut at `limit`, the second at both `limit` and -limit. Rows may be slices of wider
    ones. `out` [num_rows, dim], contiguous, in gate_up's dtype.
    """
    return _gated(gate_up, Gate(GateKind.SILU, limit), out, backend)


def gelu_mul(
    gate_up: torch.Tensor, *, out: torch.Tensor | None = None, backend: Backend = Backend.AUTO
) -> torch.Tensor:
    """GELU, by its approximation with tanh, in place of silu; rounded and shaped as in `silu_mul`."""
    return _gated(gate_up, _GELU, out, backend)


def clamped_swiglu(
    gate_up: torch.Tensor,
    *,
    limit: float,
    alpha: float,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), of gates cut at `limit` and ups at both `limit` and -limit.

    In fp32 and rounded once; shaped as in `silu_mul`. A checkpoint whose gates and ups alternate is sorted when it is
    loaded.
    """
    return _gated(gate_up, Gate(GateKind.CLAMPED_SWIGLU, limit, alpha), out, backend)


def _gated(gate_up: torch.Tensor, gate: Gate, out: torch.Tensor | None, backend: Backend) -> torch.Tensor:
    check_tensor("gate_up", gate_up, (None, None), KV_DTYPES, gate_up.device)
    check_rows("gate_up", gate_up)
    if not gate.limit > 0.0:
        raise KernelArgumentError(f"limit: must be positive, got {gate.limit}")
    rows, width = gate_up.shape
    if width % 2:
        raise KernelArgumentError(f"gate_up: rows must have two halves, got {width} columns")
    out = checked_out(out, (rows, width // 2), gate_up.dtype, gate_up.device, gate_up=gate_up)
    if out.numel() and uses_triton(backend, gate_up):
        from kernels.gated_activation.triton import launch

        launch(gate_up, gate, out)
    else:
        reference.gated(gate_up, gate, out)
    return out
