"""How 16-bit values that products left in registers lie in memory: each thread stores 16 bytes without an exchange.

After a wgmma a thread holds 2 adjacent columns of every 8. In memory its 8 values of 32 columns are adjacent, and those
of the row's 3 other threads follow: places.column_at says which column lies where.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def memory_layout(columns):
    """Returns the register layout of [64, columns] values in the order of memory, 8 adjacent ones a thread."""
    blocks = [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *blocks, [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def reordered(values, LAYOUT: gl.constexpr):
    """Returns [64, columns] values of a product in the order of memory, or those in that order as a product has them.

    LAYOUT is that of the result; registers are only named anew.
    """
    COLUMNS: gl.constexpr = values.shape[1]
    values = gl.permute(gl.reshape(values, [64, COLUMNS // 32, 4, 4, 2]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(values, [64, COLUMNS]), LAYOUT, assert_trivial=True)
