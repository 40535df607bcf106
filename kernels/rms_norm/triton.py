"""rms_norm in Triton: one program for one row, read once.

The number of warps follows from the row's width alone, so the order of its sum does too.
"""

import torch
import triton
import triton.language as tl

from kernels.launches import allow_next_launch_and_wait, overlap_options

# Elements that one warp sums: few enough that a short batch, bound by latency, has many loads in flight.
WARP_ELEMENTS = 512
MAX_WARPS = 16


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit
def normalise_rows(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    total_ptr,
    eps,
    stride_x_row,
    stride_residual_row,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    ok = d < D
    weight = tl.load(weight_ptr + d, mask=ok, other=0.0)
    allow_next_launch_and_wait(OVERLAPS)
    x = tl.load(x_ptr + row * stride_x_row + d, mask=ok, other=0.0)
    wide = x.to(tl.float32)
    if ADDS:
        residual = tl.load(residual_ptr + row * stride_residual_row + d, mask=ok, other=0.0)
        total = (wide + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * D + d, total, mask=ok)
        wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    tl.store(out_ptr + row * D + d, (wide * scale * weight.to(tl.float32)).to(out_ptr.dtype.element_ty), mask=ok)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor | None,
) -> None:
    """Fills out and total; checked, non-empty arguments."""
    rows, dim = x.shape
    block = triton.next_power_of_2(dim)
    with torch.cuda.device_of(x):
        normalise_rows[(rows,)](
            x,
            weight,
            x if residual is None else residual,
            out,
            out if total is None else total,
            eps,
            x.stride(0),
            x.stride(0) if residual is None else residual.stride(0),
            D=dim,
            BLOCK_D=block,
            ADDS=residual is not None,
            num_warps=min(MAX_WARPS, max(1, block // WARP_ELEMENTS)),
            **overlap_options(x.device),
        )
