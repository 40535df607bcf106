"""Folds the parts of what was cut by load at the attention's end, by all of its programs together.

They meet once, when every part is written. A task is 8 rows of a tile; each consumer folds its own half of the columns.
Tasks go round the programs, so that all are busy where few tiles have many parts. Parts are added in order: a result's
bits depend on the cuts alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.barriers import grid_barrier
from kernels.softmax.triton import LN_2, NO_KEYS

# Parts that a task reads at a time: 64 values for each thread. Tasks of 128 or 64 columns, which read 8 or 16 parts at
# a time, take 63.2 or 64.7 us where these take 62.1 (64 heads, 16 x 8,192, H200).
PARTS_AT_ONCE = gl.constexpr(4)


@gluon.jit
def fold_together(
    results,
    together,
    num_tokens,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    """Called by both consumers of every program, each with its HALF: 0 has columns 0 .. 255, 1 the others.

    The second writes log-sum-exps. Where nothing was cut, no program waits.
    """
    arrivals_ptr, counts_ptr, shared_ptr = together
    TASKS: gl.constexpr = (SLOT_ROWS + 7) // 8
    units = gl.load(counts_ptr + 2)
    if units > 0:
        grid_barrier(arrivals_ptr, 2 * gl.num_programs(0))
    for task in range(gl.program_id(0), units * TASKS, gl.num_programs(0)):
        unit = shared_ptr + task // TASKS * 4
        block = task % TASKS
        first_row, rows, parts, slot = gl.load(unit), gl.load(unit + 1), gl.load(unit + 2), gl.load(unit + 3)
        if block * 8 < rows:
            fold_rows(results, num_tokens, first_row, rows, block * 8, parts, slot, HALF, HEADS, SLOT_ROWS, WANTS_LSE)


@gluon.jit
def fold_rows(
    results,
    num_tokens,
    first_row,
    rows,
    begin_row,
    parts,
    first_slot,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    """Writes the results of 8 rows of a tile from `begin_row` on: the sum of its parts, weighed by their maxima."""
    out_ptr, lse_ptr, acc_ptr, row_max_ptr, row_sum_ptr = results
    # Parts, groups of eight columns, rows, columns of a group: as a partial result lies in memory, see part_at.
    VALUES: gl.constexpr = gl.BlockedLayout([PARTS_AT_ONCE, 1, 1, 4], [1, 2, 8, 2], [1, 4, 1, 1], [3, 2, 1, 0])
    SUM: gl.constexpr = gl.SliceLayout(0, VALUES)
    STATS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, VALUES))
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SUM))
    stats_part = gl.arange(0, PARTS_AT_ONCE, gl.SliceLayout(1, STATS))
    stats_row = begin_row + gl.arange(0, 8, gl.SliceLayout(0, STATS))
    part = gl.arange(0, PARTS_AT_ONCE, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, VALUES))))[
        :, None, None, None
    ]
    group = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, VALUES))))[None, :, None, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, VALUES))))[None, None, :, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, VALUES))))[None, None, None, :]
    row += begin_row
    values_at = (HALF * 32 + group) * (SLOT_ROWS * 8) + row * 8 + column
    top = gl.full([8], NO_KEYS, gl.float32, ROW)
    total = gl.zeros([8], gl.float32, ROW)
    acc = gl.zeros([32, 8, 8], gl.float32, SUM)
    for first in range(0, parts, PARTS_AT_ONCE):
        # Past the first cache: other programs have written them.
        there = (first + stats_part < parts)[:, None] & (stats_row < rows)[None, :]
        stats_at = (first_slot + first + stats_part)[:, None] * SLOT_ROWS + stats_row[None, :]
        peaks = gl.load(row_max_ptr + stats_at, mask=there, other=NO_KEYS, cache_modifier=".cg")
        sums = gl.load(row_sum_ptr + stats_at, mask=there, other=0.0, cache_modifier=".cg")
        slots = (first_slot + first + part).to(gl.int64) * (SLOT_ROWS * 512)
        there = (first + part < parts) & (row < rows)
        values = gl.load(acc_ptr + slots + values_at, mask=there, other=0.0, cache_modifier=".cg")
        peak = gl.maximum(gl.convert_layout(gl.max(peaks, 0), ROW), top)
        keep = gl.exp2(top - peak)
        weight = gl.exp2(peaks - gl.convert_layout(peak, gl.SliceLayout(0, STATS))[None, :])
        total = total * keep + gl.convert_layout(gl.sum(weight * sums, 0), ROW)
        acc = acc * keep[None, :, None] + gl.sum(values * weight[:, None, :, None], 0)
        top = peak
    share = 1.0 / gl.where(total == 0.0, 1.0, total)
    group = HALF * 32 + gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, SUM)))[:, None, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, SUM)))[None, None, :]
    row = begin_row + gl.arange(0, 8, ROW)
    to = (first_row + row).to(gl.int64)
    result = (acc * share[None, :, None]).to(gl.bfloat16)
    gl.store(out_ptr + to[None, :, None] * 512 + group * 8 + column, result, mask=(row < rows)[None, :, None])
    if WANTS_LSE:
        lse = gl.where(total == 0.0, float("-inf"), (top + gl.log2(total)) * LN_2)
        gl.store(lse_ptr + to % HEADS * num_tokens + to // HEADS, lse, mask=row < rows)
