"""Folds the parts of what was cut by load at the attention's end, by all of its programs together.

They meet once, when every part is written. A task is 8 rows of a tile and 256 of its columns; of tiles with many parts
it is 2 rows, whose parts are shared out among threads. Tasks go round the programs, so that all are busy where few
tiles have many parts. Parts are added in order: a result's bits depend on the cuts alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.barriers import grid_barrier
from kernels.mla_decode import cut_sizes
from kernels.mla_decode.hopper.meeting import meet
from kernels.mla_decode.hopper.parts import level, share
from kernels.mla_decode.hopper.places import column_at
from kernels.softmax.triton import LN_2, NO_KEYS

# Parts that a thread reads at a time, 32 bytes of each: eight, with 9 KB more code, take 64.2 us where these take 60.6
# (64 heads, 16 x 8,192, H200).
PARTS_AT_ONCE = gl.constexpr(4)
MANY, PIECES, ROW_BLOCK = (
    gl.constexpr(cut_sizes.MANY_PARTS),
    gl.constexpr(cut_sizes.PIECES),
    gl.constexpr(cut_sizes.ROW_BLOCK),
)
# Parts, rows, columns: 128 bytes of each of 4 rows a warp.
VALUES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 4, 0], [1, 0, 0], [2, 0, 0]],
        lane_bases=[[0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0]],
        warp_bases=[[0, 0, 64], [0, 0, 128]],
        block_bases=[],
        shape=[4, 8, 256],
    )
)


@gluon.jit
def fold_together(
    results,
    together,
    num_tokens,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    FEW: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    """Called by both consumers of every program, each with its HALF: 0 has columns 0 .. 255, 1 the others.

    FEW: called by the only consumer, which takes halves in turn. Where nothing was cut, or the first parts' programs
    merge the others, no program waits.
    """
    arrivals_ptr, counts_ptr, shared_ptr = together
    TASKS: gl.constexpr = (SLOT_ROWS + ROW_BLOCK - 1) // ROW_BLOCK
    pieces = gl.load(counts_ptr + 2)
    first_task = gl.program_id(0)
    step = gl.num_programs(0)
    if pieces > 0:
        if FEW:
            first_task, step = meet(arrivals_ptr, gl.load(counts_ptr + 1))
        else:
            grid_barrier(arrivals_ptr, 2 * gl.num_programs(0))
    for task in range(first_task, pieces * (2 * TASKS if FEW else TASKS), step):
        half = HALF
        if FEW:
            half = task % 2
            task = task // 2
        piece = shared_ptr + task // TASKS * 4
        first_row, rows, parts, part_row = gl.load(piece), gl.load(piece + 1), gl.load(piece + 2), gl.load(piece + 3)
        fold_rows(
            results,
            num_tokens,
            (first_row, rows, task % TASKS, parts, part_row),
            half,
            HEADS,
            SLOT_ROWS,
            FEW,
            WANTS_LSE,
        )


@gluon.jit
def fold_rows(
    results,
    num_tokens,
    task,
    half,
    HEADS: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    FEW: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    """Writes the results of a block of a piece's rows: the sum of their parts, weighed by their sums of weights."""
    out_ptr, lse_ptr, parts_ptr, levels_ptr = results
    first_row, rows, block, parts, part_row = task
    SUM: gl.constexpr = gl.SliceLayout(0, VALUES)
    STATS: gl.constexpr = gl.SliceLayout(2, VALUES)
    ROW: gl.constexpr = gl.SliceLayout(0, STATS)
    # Eight rows, or two and for each four series of parts.
    row_bits = 3
    series = 1
    if FEW:
        row_bits = gl.where(parts >= MANY, 1, 3)
        series = gl.where(parts >= MANY, PIECES, 1)
    lane = gl.arange(0, 8, ROW)
    row = (block << row_bits) + (lane & ((1 << row_bits) - 1))
    part = gl.arange(0, PARTS_AT_ONCE, gl.SliceLayout(1, STATS))[:, None] * series + (lane >> row_bits)[None, :]
    place = half * 256 + gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(1, VALUES)))
    stats_at = part * SLOT_ROWS + row[None, :]
    values_at = stats_at[:, :, None] * 512 + place[None, None, :]
    levels_ptr += part_row
    parts_ptr += part_row.to(gl.int64) * 512
    top = gl.full([8], NO_KEYS, gl.float32, ROW)
    total = gl.zeros([8], gl.float32, ROW)
    acc = gl.zeros([8, 256], gl.float32, SUM)
    for first in range(0, parts, PARTS_AT_ONCE * series):
        # Past the first cache: other programs have written them.
        there = (first + part < parts) & (row < rows)[None, :]
        from_first = first * SLOT_ROWS
        levels = gl.load(levels_ptr + from_first + stats_at, mask=there, other=float("-inf"), cache_modifier=".cg")
        from_first *= 512
        there = there[:, :, None]
        values = gl.load(parts_ptr + from_first + values_at, mask=there, other=0.0, cache_modifier=".cg")
        peak = gl.maximum(gl.max(levels, 0), top)
        keep = gl.exp2(top - peak)
        weight = gl.exp2(levels - peak[None, :])
        total = total * keep + gl.sum(weight, 0)
        keep = gl.convert_layout(keep, gl.SliceLayout(1, SUM), assert_trivial=True)
        acc = acc * keep[:, None] + gl.sum(values.to(gl.float32) * weight[:, :, None], 0)
        top = peak
    if FEW:
        acc, top, total = with_series_summed(acc, top, total, series, SUM, ROW)
    live = (row < rows) & (lane >> row_bits == 0)
    store_folded(
        (out_ptr, lse_ptr, num_tokens), acc, top, total, first_row + row, live, half, HEADS, FEW, WANTS_LSE, SUM
    )


@gluon.jit
def with_series_summed(acc, top, total, series, SUM: gl.constexpr, ROW: gl.constexpr):
    """Adds up the series of two rows' parts, where there are several; each of them gets the sums."""
    if series > 1:
        tops = gl.reshape(top, [4, 2])
        peak = gl.max(tops, 0)
        weight = gl.exp2(tops - peak[None, :])
        peaks = peak[None, :] + gl.zeros_like(tops)
        totals = gl.sum(gl.reshape(total, [4, 2]) * weight, 0)[None, :] + gl.zeros_like(tops)
        sums = gl.reshape(acc, [4, 2, 256])
        by_row = gl.convert_layout(weight, gl.SliceLayout(2, sums.type.layout), assert_trivial=True)
        sums = gl.sum(sums * by_row[:, :, None], 0)[None, :, :] + gl.zeros_like(sums)
        acc = gl.convert_layout(gl.reshape(sums, [8, 256]), SUM, assert_trivial=True)
        top = gl.convert_layout(gl.reshape(peaks, [8]), ROW, assert_trivial=True)
        total = gl.convert_layout(gl.reshape(totals, [8]), ROW, assert_trivial=True)
    return acc, top, total


@gluon.jit
def store_folded(
    results,
    acc,
    top,
    total,
    to,
    live,
    half,
    HEADS: gl.constexpr,
    FEW: gl.constexpr,
    WANTS_LSE: gl.constexpr,
    SUM: gl.constexpr,
):
    """Stores 256 columns of folded rows at row `to` of the outputs, and log-sum-exps."""
    out_ptr, lse_ptr, num_tokens = results
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SUM)
    to = to.to(gl.int64)
    if WANTS_LSE:
        lse = level(top, total) * LN_2
        gl.store(lse_ptr + to % HEADS * num_tokens + to // HEADS, lse, mask=live & (half == 1))
    shares = gl.convert_layout(share(total), BY_ROW, assert_trivial=True)
    to = gl.convert_layout(to, BY_ROW, assert_trivial=True)
    live = gl.convert_layout(live, BY_ROW, assert_trivial=True)
    column = half * 256 + column_at(gl.arange(0, 256, gl.SliceLayout(0, SUM)), FEW)
    result = (acc * shares[:, None]).to(gl.bfloat16)
    gl.store(out_ptr + to[:, None] * 512 + column[None, :], result, mask=live[:, None])
