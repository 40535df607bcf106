"""Folds the pieces of lists where each had a program of its own, in ascending order, as one program with all does."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.gathered.items import share_of
from kernels.hopper.launches import wait_for_last_launch


@gluon.jit
def fold_pieces(keys, results, pieces, COUNT: gl.constexpr, PIECE: gl.constexpr, HEADS: gl.constexpr):
    """Called by one warp for a head of a query; its part of a piece lies as `items.part_at` says."""
    wait_for_last_launch()
    TILES: gl.constexpr = (HEADS + 63) // 64
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 1], [1, 0])
    out_ptr, _, acc_ptr, row_max_ptr, row_sum_ptr = results
    token = (gl.program_id(0) // HEADS).to(gl.int64)
    head = gl.program_id(0) % HEADS + gl.arange(0, 1, gl.SliceLayout(1, L))
    row = head % 64
    dim = gl.arange(0, 512, gl.SliceLayout(0, L))
    inside = (row * 8)[:, None] + (dim // 8 * 512 + dim % 8)[None, :]
    count = COUNT(keys, token)
    slot = token * (pieces * TILES) + gl.program_id(0) % HEADS // 64
    out = gl.zeros([1, 512], gl.float32, L)
    if count > 0:
        acc = gl.load(acc_ptr + slot * 32768 + inside)
        row_max = gl.load(row_max_ptr + slot * 64 + row)
        row_sum = gl.load(row_sum_ptr + slot * 64 + row)
        for _first in range(PIECE, count, PIECE):
            slot += TILES
            part = gl.load(acc_ptr + slot * 32768 + inside)
            part_max = gl.load(row_max_ptr + slot * 64 + row)
            part_sum = gl.load(row_sum_ptr + slot * 64 + row)
            new_max = gl.maximum(row_max, part_max)
            keep = gl.exp2(row_max - new_max)
            weight = gl.exp2(part_max - new_max)
            acc = gl.fma(acc, gl.zeros_like(acc) + keep[:, None], part * weight[:, None])
            row_sum = gl.fma(row_sum, keep, part_sum * weight)
            row_max = new_max
        out = acc * share_of(results, row_max, row_sum, 0, head, HEADS)[:, None]
    gl.store(out_ptr + (token * HEADS + head)[:, None] * 512 + dim[None, :], out.to(gl.bfloat16))
