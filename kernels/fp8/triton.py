"""The arithmetic of fp8 rows as jit functions that the ops' kernels call.

Knows nothing of where rows come from; a row is one token's one head, padded to a power of two with zeros.
"""

import triton
import triton.language as tl


@triton.jit
def stored_scale(peak, row_ok, scales_ptr, scale_at):
    """The scale of rows whose largest sizes are peak [n], after storing it at scale_at [n]."""
    E4M3_MAX: tl.constexpr = 448.0
    LEAST_SCALE: tl.constexpr = 1.1754943508222875e-38
    scale = tl.maximum(tl.div_rn(peak, E4M3_MAX), LEAST_SCALE)
    tl.store(scales_ptr + scale_at, scale, mask=row_ok)
    return scale


@triton.jit
def codes_of(x, scale):
    """Codes of fp32 numbers; scale broadcasts."""
    E4M3_MAX: tl.constexpr = 448.0
    quotient = tl.div_rn(x, scale)
    return tl.clamp(quotient, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def quantise_rows(rows, row_ok, scales_ptr, scale_at, PER_TOKEN: tl.constexpr):
    """Codes of rows [n, BLOCK_D]; per token the scales are made here and stored at scale_at [n]."""
    x = rows.to(tl.float32)
    if PER_TOKEN:
        scale = stored_scale(tl.max(tl.abs(x), 1), row_ok, scales_ptr, scale_at)[:, None]
    else:
        scale = tl.load(scales_ptr)
    return codes_of(x, scale)


@triton.jit
def dequantise_rows(codes, row_ok, scales_ptr, scale_at, PER_TOKEN: tl.constexpr):
    """fp32 numbers of codes [n, BLOCK_D]."""
    if PER_TOKEN:
        scale = tl.load(scales_ptr + scale_at, mask=row_ok, other=1.0)
        numbers = codes.to(tl.float32) * scale[:, None]
    else:
        numbers = codes.to(tl.float32) * tl.load(scales_ptr)
    return numbers
