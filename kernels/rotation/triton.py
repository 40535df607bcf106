"""Parts of rows in Triton: loads and stores of [n, SIZE] elements, their norm, and the rotation of two halves."""

import triton
import triton.language as tl


@triton.jit
def load_part(row_ptr, row_ok, START: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Elements [START, START + SIZE) of rows [n]."""
    d = tl.arange(0, BLOCK)[None, :]
    return tl.load(row_ptr[:, None] + (START + d), mask=row_ok[:, None] & (d < SIZE), other=0.0)


@triton.jit
def store_part(row_ptr, row_ok, x, START: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Stores elements [START, START + SIZE) of rows [n]."""
    d = tl.arange(0, BLOCK)[None, :]
    tl.store(row_ptr[:, None] + (START + d), x, mask=row_ok[:, None] & (d < SIZE))


@triton.jit
def squares(x):
    """Sums of squares of rows, in fp32."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def normalise_part(x, scale, weight_ptr, START: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A part of rows [n] times their scales and that part of the weight, rounded once."""
    d = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + START + d, mask=d < SIZE, other=0.0)
    return (x.to(tl.float32) * scale[:, None] * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def turned(first, second, angle_ptr, row_ok, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """The two halves of rows [n] turned with each other; angle_ptr [n] are rows of the table."""
    cos = load_part(angle_ptr, row_ok, 0, HALF, BLOCK_HALF)
    sin = load_part(angle_ptr, row_ok, HALF, HALF, BLOCK_HALF)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)
