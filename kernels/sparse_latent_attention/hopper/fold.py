"""Folds the pieces of a launch of few rows, in ascending order, as a program with all of a row's pieces does."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["num_keys_ptr"])
def fold_pieces(num_keys_ptr, out_ptr, acc_ptr, row_max_ptr, row_sum_ptr, TILES: tl.constexpr, PIECES: tl.constexpr,
                PIECE: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """One program for a head of a query; its part of a piece lies as `items.part_at` says."""
    token = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    row = head % 64
    dim = tl.arange(0, 512)
    inside = dim // 8 * 512 + row * 8 + dim % 8
    count = tl.minimum(tl.load(num_keys_ptr + token), K)
    slot = token * (PIECES * TILES) + head // 64
    out = tl.zeros([512], tl.float32)
    if count > 0:
        acc = tl.load(acc_ptr + slot * 32768 + inside)
        row_max = tl.load(row_max_ptr + slot * 64 + row)
        row_sum = tl.load(row_sum_ptr + slot * 64 + row)
        for _first in tl.range(PIECE, count, PIECE):
            slot += TILES
            part = tl.load(acc_ptr + slot * 32768 + inside)
            part_max = tl.load(row_max_ptr + slot * 64 + row)
            part_sum = tl.load(row_sum_ptr + slot * 64 + row)
            new_max = tl.maximum(row_max, part_max)
            keep = tl.exp2(row_max - new_max)
            weight = tl.exp2(part_max - new_max)
            acc = tl.fma(acc, tl.zeros_like(acc) + keep, part * weight)
            row_sum = tl.fma(row_sum, keep, part_sum * weight)
            row_max = new_max
        out = acc * (1.0 / row_sum)
    tl.store(out_ptr + (token * HEADS + head) * 512 + dim, out.to(out_ptr.dtype.element_ty))
