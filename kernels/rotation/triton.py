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


@triton.jit
def rotate_row_tails(
    row_ptr, angle_ptr, row_ok, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INVERSE: tl.constexpr
):
    """Turns the last 2 HALF elements of rows [n] of DIM in place, neighbours with each other, or turns them back."""
    ROWS: tl.constexpr = row_ptr.shape[0]
    tail = load_part(row_ptr, row_ok, DIM - 2 * HALF, 2 * HALF, 2 * BLOCK_HALF)
    even, odd = tl.split(tl.reshape(tail, (ROWS, BLOCK_HALF, 2)))
    if INVERSE:
        # By the negated angle each takes the other's part.
        odd, even = turned(odd, even, angle_ptr, row_ok, HALF, BLOCK_HALF)
    else:
        even, odd = turned(even, odd, angle_ptr, row_ok, HALF, BLOCK_HALF)
    tail = tl.reshape(tl.join(even, odd), (ROWS, 2 * BLOCK_HALF))
    store_part(row_ptr, row_ok, tail, DIM - 2 * HALF, 2 * HALF, 2 * BLOCK_HALF)


@triton.jit
def store_normed_tail(
    wide, out_ptr, norm_ptr, angle_ptr, eps, kept, D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Stores a row [BLOCK_D], in fp32 and 0 behind D, by its norm and with its last 2 HALF elements turned, neighbours
    with each other; it is rounded after the norm and after the turn."""
    dtype = out_ptr.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    weight = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    normed = (wide * scale * weight).to(dtype).to(tl.float32)
    even, odd = tl.split(tl.reshape(normed, (BLOCK_D // 2, 2)))
    pair = tl.arange(0, BLOCK_D // 2) - (D // 2 - HALF)
    turns = (pair >= 0) & (pair < HALF)
    cos = tl.load(angle_ptr + pair, mask=turns, other=1.0)
    sin = tl.load(angle_ptr + HALF + pair, mask=turns, other=0.0)
    row = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (BLOCK_D,))
    tl.store(out_ptr + d, row.to(dtype), mask=(d < D) & kept)
