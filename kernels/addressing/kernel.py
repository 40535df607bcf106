"""Offsets of elements inside one page, by layout; jit functions that the ops' kernels call.

Knows nothing beyond one page: the caller adds page_id * stride_page in 64 bits. A page is small, so 32 bits do here.
"""

import triton
import triton.language as tl


@triton.jit
def key_offset(
    slot,
    head,
    d,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Of element d of a key; slot, head and d broadcast against each other."""
    if LAYOUT == 0:
        offset = (slot * HEADS + head) * D + d
    elif LAYOUT == 1:
        offset = (head * PAGE + slot) * D + d
    else:
        offset = ((head * (D // X) + d // X) * PAGE + slot) * X + d % X
    return offset


@triton.jit
def value_offset(
    slot,
    head,
    d,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Of element d of a value; slot, head and d broadcast against each other."""
    if LAYOUT == 0:
        offset = (slot * HEADS + head) * D + d
    elif LAYOUT == 1:
        offset = (head * PAGE + slot) * D + d
    else:
        offset = ((head * (PAGE // X) + slot // X) * D + d) * X + slot % X
    return offset
