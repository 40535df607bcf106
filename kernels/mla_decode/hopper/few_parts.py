"""Parts and whole results where heads are few: products leave a thread some dimensions of some heads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.registers import opaque


def _places(rows: int) -> gl.DistributedLinearLayout:
    """Returns the layout of a part's rows and places, 256 columns; a thread stores 16 bytes of a row, see parts.py."""
    wide = [[1 << bit, 0] for bit in range(3, rows.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], *wide],
        lane_bases=[[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]],
        warp_bases=[[0, 64], [0, 128]],
        block_bases=[],
        shape=[rows, 256],
    )


PLACES_OF_16, PLACES_OF_32 = gl.constexpr(_places(16)), gl.constexpr(_places(32))


@gluon.jit
def store_heads(
    results,
    values,
    q_start,
    slot,
    FIRST: gl.constexpr,
    HEADS: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    ROWS: gl.constexpr,
    VALUES: gl.constexpr,
):
    """Stores 256 dimensions [256, ROWS] of one query's heads: as outputs, or as a part at its slot."""
    out_ptr, _, parts_ptr, _ = results
    result = values.to(gl.bfloat16)
    if slot >= 0:
        _store_part(parts_ptr + slot.to(gl.int64) * (SLOT_ROWS * 512) + FIRST, result, HEADS, ROWS)
    else:
        _store_output(out_ptr + q_start.to(gl.int64) * (HEADS * 512) + FIRST, result, HEADS, ROWS, VALUES)


@gluon.jit
def _store_part(part_ptr, result, HEADS: gl.constexpr, ROWS: gl.constexpr):
    PLACES: gl.constexpr = PLACES_OF_16 if ROWS == 16 else PLACES_OF_32
    places = gl.permute(gl.reshape(result, [4, 4, 2, 8, ROWS]), (4, 1, 3, 0, 2))
    places = gl.convert_layout(gl.reshape(places, [ROWS, 256]), PLACES, assert_trivial=True)
    row = opaque(gl.arange(0, ROWS, gl.SliceLayout(1, PLACES)))
    at = row[:, None] * 512 + gl.arange(0, 256, gl.SliceLayout(0, PLACES))[None, :]
    gl.store(part_ptr + at, places, mask=(row < HEADS)[:, None])


@gluon.jit
def _store_output(out_ptr, result, HEADS: gl.constexpr, ROWS: gl.constexpr, VALUES: gl.constexpr):
    row = opaque(gl.arange(0, ROWS, gl.SliceLayout(0, VALUES)))
    dim = gl.arange(0, 256, gl.SliceLayout(1, VALUES))
    gl.store(out_ptr + row[None, :] * 512 + dim[:, None], result, mask=(row < HEADS)[None, :])
