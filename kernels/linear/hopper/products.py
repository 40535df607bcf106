"""Products of a tile of weights and few rows of x, either of which has the rows of wgmma's first operand.

    outputs of a tile    first operand                  second operand              sums
    64 or more           weights [BLOCK_N, BLOCK_K]     x [COLUMNS, BLOCK_K]'       [BLOCK_N, COLUMNS]
    32                   x, as 64 rows [64, BLOCK_K]    weights [BLOCK_N, BLOCK_K]' [64, BLOCK_N]

A sum is the same chain in both: products of 16 columns of the depth, in ascending order, added up in fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

# Rows of wgmma's first operand: a product takes no fewer.
ROWS = gl.constexpr(64)
# Columns that lie together: a stage is stored as blocks of all its rows and 64 columns, lines of 128 bytes.
BLOCK = gl.constexpr(64)


@gluon.constexpr_function
def num_products(block_n, block_k):
    """Returns how many products a stage takes."""
    return block_k // 64 if block_n < 64 else 1


@gluon.constexpr_function
def stages_behind(block_n, columns, block_k):
    """Returns how many stages must follow a ring's last stage of x, so that 64 rows can be read there."""
    return -(-(64 - columns) * 64 // (columns * block_k)) if block_n < 64 else 0


@gluon.constexpr_function
def width_of_sums(block_n, columns):
    """Returns the number of columns of a tile's sums."""
    return block_n if block_n < 64 else columns


@gluon.jit
def clear_sums(BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns zeros, in the layout of products."""
    HEIGHT: gl.constexpr = max(BLOCK_N, ROWS)
    WIDTH: gl.constexpr = width_of_sums(BLOCK_N, COLUMNS)
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    return gl.zeros([HEIGHT, WIDTH], gl.float32, L)


@gluon.jit
def multiply_stage(weights, x, acc):
    """Returns acc and the products of a stage, weights [BLOCK_N, BLOCK_K] and x [COLUMNS, BLOCK_K], under way."""
    BLOCK_N: gl.constexpr = weights.shape[0]
    BLOCK_K: gl.constexpr = weights.shape[1]
    if BLOCK_N < ROWS:
        # Behind a block's COLUMNS rows, 64 rows reach into what follows in the ring: anything, even NaN. A row of a
        # product depends on no other row, and those are not stored.
        for first in gl.static_range(0, BLOCK_K, BLOCK):
            rows = x.slice(first, BLOCK, 1)._reinterpret(x.dtype, [ROWS, BLOCK], x.layout)
            acc = warpgroup_mma(rows, weights.slice(first, BLOCK, 1).permute((1, 0)), acc, is_async=True)
    else:
        acc = warpgroup_mma(weights, x.permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def store_sums(
    acc,
    out_ptr,
    bias_ptr,
    first_output,
    num_rows,
    num_outputs,
    stride_out_row,
    BLOCK_N: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Stores a tile's sums, with a bias if there is one."""
    HEIGHT: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    L: gl.constexpr = acc.type.layout
    # The dimension of sums that counts rows of x; the other one counts outputs.
    X_DIM: gl.constexpr = 0 if BLOCK_N < ROWS else 1
    down = gl.arange(0, HEIGHT, gl.SliceLayout(1, L))
    across = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    m, n = (down, across) if X_DIM == 0 else (across, down)
    n += first_output
    if HAS_BIAS:
        acc += gl.expand_dims(gl.load(bias_ptr + gl.minimum(n, num_outputs - 1)).to(gl.float32), X_DIM)
    m, n = gl.expand_dims(m, 1 - X_DIM), gl.expand_dims(n, X_DIM)
    target = out_ptr + m.to(gl.int64) * stride_out_row + n
    gl.store(target, acc.to(out_ptr.dtype.element_ty), mask=(m < num_rows) & (n < num_outputs))
