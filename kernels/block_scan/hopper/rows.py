"""Shared by the partitions of a scan: the row, head and blocks of their program, cleared tails of short blocks, and
zeros for tokens of no row."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kernels.block_scan.plan import GRID_TOKENS
from kernels.hopper.barriers import thread_barrier

_GRID = gl.constexpr(GRID_TOKENS)


@gluon.jit
def row_of_program(cu_blocks_ptr, blocks_ptr, working_ptr, HEADS: gl.constexpr):
    """Returns (row, head, first block, block behind the last, first token, tokens of the first block, last token + 1).

    A row's blocks follow each other, and all but the first and the last have GRID tokens. A padding row has none.
    """
    row = gl.program_id(0) // HEADS
    head = gl.program_id(0) % HEADS
    begin = gl.load(cu_blocks_ptr + row)
    end = gl.load(cu_blocks_ptr + row + 1)
    end = gl.where(gl.load(working_ptr + row) > 0, end, begin)
    last = gl.maximum(end - 1, begin)
    has = end > begin
    token = gl.load(blocks_ptr + begin * 2, mask=has, other=0)
    count = gl.load(blocks_ptr + begin * 2 + 1, mask=has, other=0)
    stop = gl.load(blocks_ptr + last * 2, mask=has, other=0) + gl.load(blocks_ptr + last * 2 + 1, mask=has, other=0)
    return row, head, begin, end, token, count, stop


@gluon.jit
def clear_outputs(out_ptr, begin, end, head, HEADS: gl.constexpr, DV: gl.constexpr, BV: gl.constexpr):
    """Writes zeros as the outputs of tokens `begin` to `end` - 1, in one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [1, 1], [1, 0])
    column = head * DV + gl.program_id(1) * BV + gl.arange(0, BV, gl.SliceLayout(0, LAYOUT))
    zeros = gl.zeros([16, BV], out_ptr.dtype.element_ty, LAYOUT)
    for first in range(begin, end, 16):
        token = first + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        at = token.to(gl.int64)[:, None] * (HEADS * DV) + column[None, :]
        gl.store(out_ptr + at, zeros, mask=(token < end)[:, None] & (column >= 0)[None, :])


@gluon.jit
def clear_uncovered(
    out_ptr, cu_seqlens_ptr, working_ptr, num_rows, num_tokens,
    HEADS: gl.constexpr, DV: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    """Writes zeros as the outputs of a padding row's tokens; programs of the last row write those of the tokens behind
    it, too."""
    row = gl.program_id(0) // HEADS
    head = gl.program_id(0) % HEADS
    if gl.load(working_ptr + row) <= 0:
        begin = gl.load(cu_seqlens_ptr + row)
        clear_outputs(out_ptr, begin, gl.load(cu_seqlens_ptr + row + 1), head, HEADS, DV, BV)
    if row == num_rows - 1:
        clear_outputs(out_ptr, gl.load(cu_seqlens_ptr + num_rows), num_tokens, head, HEADS, DV, BV)


@gluon.jit
def clear_tail(tile, count, D: gl.constexpr):
    """Zeros in rows from `count` on of [GRID, D], for products: there lie another row's tokens, which may be NaN.

    16 rows at a time, each in a branch of its own: all at once would fill the registers.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    if count < _GRID:
        for part in gl.static_range(_GRID // 16):
            if (part + 1) * 16 > count:
                token = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
                some = tile.slice(part * 16, 16, 0)
                some.store(gl.where((token < count)[:, None], some.load(LAYOUT), 0.0))
        fence_async_shared()
        thread_barrier()
