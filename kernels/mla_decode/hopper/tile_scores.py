"""Where the scores of a tile lie between the two launches of mla_decode for few sequences: as threads have them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.registers import opaque

# Rows and places of a tile's scores: a thread has four places side by side, 16 bytes, and its neighbours those behind.
PLACES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], [0, 32], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
# The same places where 32 of them are a row.
COPIED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [32, 0], [64, 0], [4, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[128, 32],
    )
)


@gluon.jit
def _offsets(tile):
    row = opaque(gl.arange(0, 64, gl.SliceLayout(1, PLACES))).to(gl.int64)
    place = gl.arange(0, 64, gl.SliceLayout(0, PLACES))
    return (tile.to(gl.int64) * 4096 + row * 16)[:, None] + (place // 16 * 1024 + place % 16).to(gl.int64)[None, :]


@gluon.jit
def store_scores(scores_ptr, tile, scores):
    """Stores a tile's scores [64, 64], in the layout of a product."""
    places = gl.permute(gl.reshape(scores, [64, 4, 2, 4, 2]), (0, 1, 3, 2, 4))
    places = gl.convert_layout(gl.reshape(places, [64, 64]), PLACES, assert_trivial=True)
    gl.store(scores_ptr + _offsets(tile), places)


@gluon.jit
def scores_of(copied, LAYOUT: gl.constexpr):
    """Returns what `store_scores` stored, from shared memory [128, 32] of the same order."""
    places = gl.reshape(copied.load(COPIED), [4, 64, 4, 2, 2])
    return gl.convert_layout(gl.reshape(gl.permute(places, (1, 0, 3, 2, 4)), [64, 64]), LAYOUT, assert_trivial=True)
