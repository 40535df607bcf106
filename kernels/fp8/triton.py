"""The arithmetic of fp8 rows as jit functions that the ops' kernels call.

A row is one token's one head, padded to a power of two with zeros.
"""

import triton
import triton.language as tl


@triton.jit
def scale_of(amax):
    """The scale of rows whose largest sizes are amax [n]."""
    E4M3_MAX: tl.constexpr = 448.0
    LEAST_SCALE: tl.constexpr = 1.1754943508222875e-38
    return tl.maximum(tl.div_rn(amax, E4M3_MAX), LEAST_SCALE)


@triton.jit
def stored_scale(amax, row_ok, scales_ptr, scale_at):
    """The scale of rows whose largest sizes are amax [n], after storing it at scale_at [n]."""
    scale = scale_of(amax)
    tl.store(scales_ptr + scale_at, scale, mask=row_ok)
    return scale


@triton.jit
def quantized(x, scale):
    """Returns e4m3 values of fp32 ones; scale broadcasts."""
    return saturated(tl.div_rn(x, scale))


@triton.jit
def saturated(x):
    """Returns the e4m3 values next to fp32 ones."""
    E4M3_MAX: tl.constexpr = 448.0
    return tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def quantise_rows(rows, row_ok, scales_ptr, scale_at, PER_TOKEN: tl.constexpr):
    """Returns quantized rows [n, BLOCK_D]; scales per token are computed here and stored at scale_at [n]."""
    x = rows.to(tl.float32)
    if PER_TOKEN:
        scale = stored_scale(tl.max(tl.abs(x), 1), row_ok, scales_ptr, scale_at)[:, None]
    else:
        scale = tl.load(scales_ptr)
    return quantized(x, scale)


@triton.jit
def dequantise_rows(rows, row_ok, scales_ptr, scale_at, PER_TOKEN: tl.constexpr):
    """Returns dequantized rows [n, BLOCK_D], fp32."""
    if PER_TOKEN:
        scale = tl.load(scales_ptr + scale_at, mask=row_ok, other=1.0)
        dequantized = rows.to(tl.float32) * scale[:, None]
    else:
        dequantized = rows.to(tl.float32) * tl.load(scales_ptr)
    return dequantized
