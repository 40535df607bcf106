"""Gated activations in Triton: pure traffic, one program for a run of one row's columns."""

import torch
import triton
import triton.language as tl

from kernels.gated_activation.gate import Gate, GateKind
from kernels.gated_activation.reference import GELU_CUBIC, GELU_SLOPE
from kernels.launches import allow_next_launch_and_wait, overlap_options

# Columns of a program: 2 KiB of each half, written as one run.
COLUMNS = 1024

SILU: tl.constexpr = tl.constexpr(GateKind.SILU.value)
CLAMPED_SWIGLU: tl.constexpr = tl.constexpr(GateKind.CLAMPED_SWIGLU.value)
SLOPE: tl.constexpr = tl.constexpr(GELU_SLOPE)
CUBIC: tl.constexpr = tl.constexpr(GELU_CUBIC)


@triton.jit
def gate_rows(
    gate_up_ptr,
    out_ptr,
    stride_row,
    limit,
    alpha,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    CLAMPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next_launch_and_wait(OVERLAPS)
    runs: tl.constexpr = tl.cdiv(D, COLUMNS)
    row = (tl.program_id(0) // runs).to(tl.int64)
    d = tl.program_id(0) % runs * COLUMNS + tl.arange(0, COLUMNS)
    ok = d < D
    gate = tl.load(gate_up_ptr + row * stride_row + d, mask=ok, other=0.0)
    up = tl.load(gate_up_ptr + row * stride_row + D + d, mask=ok, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    if CLAMPS:
        # Comparisons rather than minima, which would make a NaN a number.
        wide = tl.where(wide > limit, limit, wide)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if KIND == CLAMPED_SWIGLU:
        up += 1.0
        activated = wide / (1.0 + tl.exp(-(wide * alpha)))
    else:
        slope = wide if KIND == SILU else (wide * wide * wide * CUBIC + wide) * SLOPE
        activated = (wide / (1.0 + tl.exp(-slope))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * D + d, (activated * up).to(gate.dtype), mask=ok)


def launch(gate_up: torch.Tensor, gate: Gate, out: torch.Tensor) -> None:
    """Fills out; checked, non-empty arguments."""
    rows, dim = out.shape
    columns = min(COLUMNS, triton.next_power_of_2(dim))
    programs = rows * triton.cdiv(dim, columns)
    with torch.cuda.device_of(gate_up):
        gate_rows[(programs,)](
            gate_up,
            out,
            gate_up.stride(0),
            gate.limit,
            gate.alpha,
            D=dim,
            COLUMNS=columns,
            KIND=gate.kind.value,
            CLAMPS=gate.clamps,
            num_warps=4,
            **overlap_options(gate_up.device),
        )
