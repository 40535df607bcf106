"""Zeros in rows of a tile in shared memory that hold no key: their weight is 0, but 0 * NaN would not be."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def clear_rows_outside(values, part, first, start, stop, ROWS: gl.constexpr):
    """Clears, of the ROWS rows of `values` in this part, those whose keys are outside start..stop; `first` is its key.

    Call it in a branch for each part that needs it: without one the compiler loads all parts before it stores the
    first, which fills the registers.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    key = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    some = values.slice(part * ROWS, ROWS, 0)
    some.store(gl.where(((key >= start) & (key < stop))[:, None], some.load(LAYOUT), 0.0))
