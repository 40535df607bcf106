"""Parts of results, of what is cut by load: where they lie, and how consumers store them or whole results.

A part is divided by its sum of weights and of bfloat16, like an output. Its level is the logarithm of that sum.
Columns of a part lie as product_layout.py says.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.registers import opaque
from kernels.mla_decode.hopper.product_layout import memory_layout, reordered


@gluon.jit
def level(row_max, row_sum):
    """Returns the logarithm to base 2 of rows' sums of weights, -inf for those that have seen no key."""
    return gl.where(row_sum == 0.0, float("-inf"), row_max + gl.log2(row_sum))


@gluon.jit
def share(row_sum):
    """Returns what to multiply a row's sum of values with."""
    return 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)


@gluon.jit
def store_rows(
    results, acc, row_sum, item, FIRST: gl.constexpr, HEADS: gl.constexpr, SLOT_ROWS: gl.constexpr, VALUES: gl.constexpr
):
    """Stores 256 columns of a tile's rows: as outputs, or as a part at its slot."""
    out_ptr, _, parts_ptr, _ = results
    q_start, q_len, tile, slot = item
    result = (acc * share(row_sum)[:, None]).to(gl.bfloat16)
    live = q_len * HEADS - tile * 64
    if slot >= 0:
        _store_part(parts_ptr + slot.to(gl.int64) * (SLOT_ROWS * 512) + FIRST, result, live)
    else:
        _store_output(out_ptr + (q_start * HEADS + tile * 64).to(gl.int64) * 512 + FIRST, result, live, VALUES)


@gluon.jit
def _store_part(part_ptr, result, live):
    LAYOUT: gl.constexpr = memory_layout(256)
    # Addresses are computed here: kept over the loop, they would cost registers.
    row = opaque(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)))
    at = row[:, None] * 512 + gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(part_ptr + at, reordered(result, LAYOUT), mask=(row < live)[:, None])


@gluon.jit
def _store_output(out_ptr, result, live, VALUES: gl.constexpr):
    row = opaque(gl.arange(0, 64, gl.SliceLayout(1, VALUES)))
    at = row[:, None] * 512 + gl.arange(0, 256, gl.SliceLayout(0, VALUES))[None, :]
    gl.store(out_ptr + at, result, mask=(row < live)[:, None])
