"""Where the weights of a tile lie between the two launches of mla_decode for few sequences: as threads have them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.registers import opaque
from kernels.mla_decode.hopper.product_layout import memory_layout, reordered

# A tile's weights in the order of memory, 64 a row: the first 32 of each row of weights, then the others.
COPIED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [32, 0], [4, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)


@gluon.jit
def _offsets(tile):
    LAYOUT: gl.constexpr = memory_layout(64)
    row = opaque(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))).to(gl.int64)
    place = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    return (tile.to(gl.int64) * 4096 + row * 32)[:, None] + (place // 32 * 2048 + place % 32).to(gl.int64)[None, :]


@gluon.jit
def store_weights(weights_ptr, tile, weights):
    """Stores a tile's weights [64, 64], in the layout of a product."""
    gl.store(weights_ptr + _offsets(tile), reordered(weights, memory_layout(64)))


@gluon.jit
def weights_of(copied, LAYOUT: gl.constexpr):
    """Returns what `store_weights` stored, from shared memory [64, 64] of the same order."""
    # Halves of a row, row, place in half: thread (lane % 4), 16-column block, 8-column block and column.
    places = gl.reshape(copied.load(COPIED), [2, 64, 4, 4, 2])
    return gl.convert_layout(gl.reshape(gl.permute(places, (1, 0, 3, 2, 4)), [64, 64]), LAYOUT, assert_trivial=True)
