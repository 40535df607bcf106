"""The binary tree in which mla_decode for Hopper adds up a sequence's leaves, in ascending order.

Both operands of an addition are rounded to bf16, so that one which waits in memory has 64 KB; the root is not rounded.
A node without a right neighbour, at a sequence's end, goes up to the next level as it is. So the tree follows from the
sequence's length alone. A program goes through its leaves in order, and keeps at most one sum of each level in memory,
until the right neighbour of that is there.

    leaf        0   1   2   3   4   5
    level 0     |   |   |   |   |   |
    level 1     |-----| |-----| |-----|
    level 2     |-------------|    |
    level 3     |------------------|
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.registers import opaque
from kernels.mla_decode.hopper.product_layout import memory_layout, reordered


@gluon.jit
def _rows_and_offsets(COLUMNS: gl.constexpr, ROWS: gl.constexpr):
    """Returns a part's row numbers [64] and the offsets [64, COLUMNS] of its values: 32 of a row, then of the next."""
    LAYOUT: gl.constexpr = memory_layout(COLUMNS)
    # Addresses are computed here: kept over a loop, they would cost registers.
    row = opaque(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)))
    place = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return row, (row * 32)[:, None] + (place // 32 * (ROWS * 32) + place % 32)[None, :]


@gluon.jit
def store_part(part_ptr, acc, live, ROWS: gl.constexpr, LIVE: gl.constexpr = True):
    """Stores columns of a partial result in bf16, in the order of product_layout.py; LIVE: rows below `live` alone."""
    COLUMNS: gl.constexpr = acc.shape[1]
    half = reordered(acc.to(gl.bfloat16), memory_layout(COLUMNS))
    row, at = _rows_and_offsets(COLUMNS, ROWS)
    if LIVE:
        gl.store(part_ptr + at, half, mask=(row < live)[:, None])
    else:
        gl.store(part_ptr + at, half)


@gluon.jit
def _load_part(part_ptr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    _, at = _rows_and_offsets(COLUMNS, 64)
    return reordered(gl.load(part_ptr + at, cache_modifier=".cg"), LAYOUT).to(gl.float32)


@gluon.jit
def _halves(x):
    """Returns the left and the right half of columns, without a move between threads."""
    return gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _joined(left, right, LAYOUT: gl.constexpr):
    both = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [64, 2 * left.shape[1]])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def _with_piece(part_ptr, piece, factor):
    LAYOUT: gl.constexpr = piece.type.layout
    some = _load_part(part_ptr, piece.shape[1], LAYOUT)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
    # The product is exact, so this rounds as fold.py does.
    return gl.fma(some, factor + gl.zeros_like(some), piece.to(gl.bfloat16).to(gl.float32))


@gluon.jit
def _with_part(part_ptr, acc, factor):
    """Returns acc [64, 256] rounded to bf16, plus a partial result in memory times a power of two for each row.

    64 columns at a time: registers are few.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    left, right = _halves(acc)
    HALF: gl.constexpr = left.type.layout
    a, b = _halves(left)
    c, d = _halves(right)
    a = _with_piece(part_ptr, a, factor)
    b = _with_piece(part_ptr + 64 * 64, b, factor)
    c = _with_piece(part_ptr + 2 * 64 * 64, c, factor)
    d = _with_piece(part_ptr + 3 * 64 * 64, d, factor)
    return _joined(_joined(a, b, HALF), _joined(c, d, HALF), LAYOUT)


@gluon.jit
def _kept_at(memory, level, HALF: gl.constexpr):
    """Returns pointers to what a program keeps of a level: 256 columns of sums, and its rows' bases and, 64 values
    behind these, their sums of weights."""
    nodes_ptr, stats_ptr = memory
    index = level * gl.num_programs(0) + gl.program_id(0)
    return nodes_ptr + index.to(gl.int64) * (64 * 512) + HALF * (64 * 256), stats_ptr + index * 256 + HALF * 128


@gluon.jit
def with_kept(memory, acc, row_sum, base, levels, HALF: gl.constexpr):
    """Returns acc and row_sum with the kept sums of these levels (a bit mask) added, lowest level first."""
    row = opaque(gl.arange(0, 64, base.type.layout))
    level = 0
    while levels > 0:
        if levels % 2 == 1:
            part_ptr, stats_ptr = _kept_at(memory, level, HALF)
            factor = gl.exp2(gl.load(stats_ptr + row) - base)
            if HALF == 0:
                row_sum = gl.fma(gl.load(stats_ptr + 64 + row), factor, row_sum)
            acc = _with_part(part_ptr, acc, factor)
        levels = levels >> 1
        level += 1
    return acc, row_sum


@gluon.jit
def keep(memory, acc, row_sum, base, bit, HALF: gl.constexpr):
    """Keeps acc and row_sum as the sum of a level, given as 1 << level."""
    level = (bit.to(gl.float32).to(gl.int32, bitcast=True) >> 23) - 127
    part_ptr, stats_ptr = _kept_at(memory, level, HALF)
    stats_ptr += opaque(gl.arange(0, 64, base.type.layout))
    gl.store(stats_ptr, base)
    if HALF == 0:
        gl.store(stats_ptr + 64, row_sum)
    store_part(part_ptr, acc, 64, 64, False)


@gluon.jit
def end_leaf(memory, acc, row_sum, base, number, leaves, HALF: gl.constexpr):
    """Adds to a program's leaf `number` of `leaves` the kept sums that are its left neighbours, to the last one all.

    Returns (acc, row_sum). The sum of a leaf that is not the last is kept, and row_sum begins again at 0.
    """
    bit = (number + 1) & ~number
    levels = bit - 1
    if number + 1 == leaves:
        levels = number
    acc, row_sum = with_kept(memory, acc, row_sum, base, levels, HALF)
    if number + 1 < leaves:
        keep(memory, acc, row_sum, base, bit, HALF)
        row_sum = row_sum * 0.0
    return acc, row_sum


@gluon.jit
def store_values(results, acc, row_sum, at, slot, live, FIRST: gl.constexpr, SLOT_ROWS: gl.constexpr):
    """Stores 256 columns of an item's rows: as a part at its slot, or as outputs from row `at` on."""
    out_ptr, _, parts_ptr, _, _, _, _ = results
    LAYOUT: gl.constexpr = acc.type.layout
    row = opaque(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)))
    dim = FIRST + gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))
    if slot >= 0:
        store_part(parts_ptr + slot.to(gl.int64) * (SLOT_ROWS * 512) + FIRST * SLOT_ROWS, acc, live, SLOT_ROWS)
    else:
        result = (acc * (1.0 / gl.where(row_sum == 0.0, 1.0, row_sum))[:, None]).to(gl.bfloat16)
        gl.store(out_ptr + (at + row)[:, None] * 512 + dim[None, :], result, mask=(row < live)[:, None])
