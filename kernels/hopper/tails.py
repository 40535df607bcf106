"""Zeros in rows of a tile in shared memory that hold no key: their weight is 0, but 0 * NaN would not be."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def clear_rows_outside(values, first, start, stop, ROWS: gl.constexpr):
    """Clears the rows of `values` whose keys, counted from `first`, are outside start..stop; ROWS rows at a time.

    A branch for each part keeps the compiler from loading all of them before it stores the first, which would fill the
    registers.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for part in gl.static_range(values.shape[0] // ROWS):
        lowest = first + part * ROWS
        if (lowest < start) | (lowest + ROWS > stop):
            key = lowest + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            some = values.slice(part * ROWS, ROWS, 0)
            some.store(gl.where(((key >= start) & (key < stop))[:, None], some.load(LAYOUT), 0.0))
