"""Gated activations in plain torch.

torch's silu, gelu and sigmoid give elements behind the last whole vector of a thread's share other bits than the rest,
so a row's would depend on the rows beside it (2 threads, 1,501 rows of 96 columns: 3 of the first 777). exp and the
arithmetic around it do not; a launch of 512 x 4,864 takes 1.8 ms rather than 1.2.
"""

import math

import torch

from kernels.gated_activation.gate import Gate, GateKind

# gelu(x) = x * (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3).
GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715


def gated(gate_up: torch.Tensor, kind: Gate, out: torch.Tensor) -> None:
    """Fills out. f(gate) is rounded to the rows' dtype before the product, that of CLAMPED_SWIGLU is not."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    if kind.clamps:
        wide, up = wide.clamp(max=kind.limit), up.float().clamp(-kind.limit, kind.limit)
    if kind.kind is GateKind.CLAMPED_SWIGLU:
        out.copy_(_times_sigmoid(wide, wide * kind.alpha) * (up.float() + 1.0))
        return
    slope = wide if kind.kind is GateKind.SILU else (wide * wide * wide * GELU_CUBIC + wide) * GELU_SLOPE
    torch.mul(_times_sigmoid(wide, slope).to(gate.dtype), up.to(gate.dtype), out=out)


def _times_sigmoid(values: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    below = logits.neg().exp_().add_(1.0)
    return torch.div(values, below, out=below)
