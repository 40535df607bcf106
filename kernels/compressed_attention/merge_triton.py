"""How the pieces of a row's list become its output, in Triton; jit functions, and a kernel for pieces with programs of
their own."""

import triton
import triton.language as tl

from kernels.softmax.triton import LOG2_E


@triton.jit
def listed(num_keys_ptr, token, WINDOW: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr):
    """Returns how many keys a row sees, how many of them its window has, and how many keys its list has."""
    num_keys = tl.load(num_keys_ptr + token)
    in_window = tl.minimum(num_keys, WINDOW)
    count = in_window
    if RATIO:
        seen = num_keys // RATIO
        count += tl.minimum(seen, K) if K else seen
    return num_keys, in_window, count


@triton.jit
def folded(acc, row_max, row_sum, part_acc, part_max, part_sum):
    """Returns the softmax state of a sum and one more piece."""
    new_max = tl.maximum(row_max, part_max)
    keep = tl.exp2(row_max - new_max)
    weight = tl.exp2(part_max - new_max)
    acc = tl.fma(acc, tl.zeros_like(acc) + keep[:, None], part_acc * weight[:, None])
    return acc, new_max, tl.fma(row_sum, keep, part_sum * weight)


@triton.jit
def finished(acc, row_max, row_sum, sink):
    """Returns the output of a row's whole list: a sink is in the sum of weights, once, and adds no value."""
    blank = tl.zeros_like(sink)
    new_max = tl.maximum(row_max, sink * LOG2_E)
    decay = tl.exp2(row_max - new_max)
    total = tl.fma(row_sum, decay, tl.exp2(tl.fma(sink, blank + LOG2_E, -new_max)))
    return acc * (decay / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit(do_not_specialize=["max_pieces"], do_not_specialize_on_alignment=["num_keys_ptr"])
def fold_pieces(
    num_keys_ptr,
    sinks_ptr,
    out_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    max_pieces,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    head = tl.program_id(0) % HEADS + tl.arange(0, 1)
    token = (tl.program_id(0) // HEADS).to(tl.int64)
    _, _, count = listed(num_keys_ptr, token, WINDOW, RATIO, K)
    d = tl.arange(0, BLOCK_D)[None, :]
    at = (token * TILES + head // ROWS) * max_pieces * ROWS + head % ROWS
    acc = tl.load(acc_ptr + at[:, None] * BLOCK_D + d)
    row_max = tl.load(row_max_ptr + at)
    row_sum = tl.load(row_sum_ptr + at)
    for _ in tl.range(PIECE, count, PIECE):
        at += ROWS
        part_acc = tl.load(acc_ptr + at[:, None] * BLOCK_D + d)
        acc, row_max, row_sum = folded(
            acc, row_max, row_sum, part_acc, tl.load(row_max_ptr + at), tl.load(row_sum_ptr + at)
        )
    out = finished(acc, row_max, row_sum, tl.load(sinks_ptr + head)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * HEADS + head)[:, None] * D + d, out, mask=d < D)
