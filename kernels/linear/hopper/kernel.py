"""linear in Gluon for Hopper where rows are few: the weights are read once, at the speed of memory.

In tiles of 64 outputs and more the weights are the rows of the products and the few rows of x their columns (W x'), so
that nothing is computed in vain. A product has 64 rows at least, so in narrower tiles, for few outputs, x has the rows
and the weights are the columns (x W'). An output is one chain of products in ascending order of the depth, 16 columns
at a time, whatever the tile: the bits of the TILED route, and of the library's GEMM where that was seen to keep its
rows.

    program    takes tiles of outputs, a launch's number of programs apart
    producer   one warp; weights and rows of x into a ring, on from tile to tile. The first weights are asked for while
               the launch before this one ends: no launch writes them
    consumer   multiplies (products.py) and stores
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from kernels.hopper.barriers import make_barriers
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.linear.hopper.products import clear_sums, multiply_stage, num_products, stages_behind, store_sums


@gluon.jit
def stream_tiles(
    weight_desc,
    x_desc,
    weight_ring,
    x_ring,
    full,
    empty,
    num_tiles,
    steps,
    BLOCK_N: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """All tiles of a program, step by step of the depth."""
    BYTES: gl.constexpr = (BLOCK_N + COLUMNS) * BLOCK_K * 2
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    total = (num_tiles - pid + programs - 1) // programs * steps
    ahead = gl.minimum(total, STAGES)
    for step in range(ahead):
        mbarrier.expect(full.index(step), BYTES)
        row = (pid + step // steps * programs) * BLOCK_N
        column = step % steps * BLOCK_K
        tma.async_copy_global_to_shared(weight_desc, [row, column], full.index(step), weight_ring.index(step))
    wait_for_last_launch()
    for step in range(ahead):
        tma.async_copy_global_to_shared(x_desc, [0, step % steps * BLOCK_K], full.index(step), x_ring.index(step))
    for step in range(ahead, total):
        at = step % STAGES
        row = (pid + step // steps * programs) * BLOCK_N
        column = step % steps * BLOCK_K
        mbarrier.wait(empty.index(at), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(at), BYTES)
        tma.async_copy_global_to_shared(weight_desc, [row, column], full.index(at), weight_ring.index(at))
        tma.async_copy_global_to_shared(x_desc, [0, column], full.index(at), x_ring.index(at))


@gluon.jit
def multiply_tiles(
    out_ptr,
    bias_ptr,
    weight_ring,
    x_ring,
    full,
    empty,
    num_rows,
    num_outputs,
    num_tiles,
    steps,
    stride_out_row,
    BLOCK_N: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    PRODUCTS: gl.constexpr = num_products(BLOCK_N, BLOCK_K)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        acc = clear_sums(BLOCK_N, COLUMNS)
        for i in range(steps):
            at = step % STAGES
            mbarrier.wait(full.index(at), (step // STAGES) & 1)
            acc = multiply_stage(weight_ring.index(at), x_ring.index(at), acc)
            acc = warpgroup_mma_wait(PRODUCTS, deps=[acc])
            # The products before these have read their stage.
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        store_sums(acc, out_ptr, bias_ptr, tile * BLOCK_N, num_rows, num_outputs, stride_out_row, BLOCK_N, HAS_BIAS)


@gluon.jit(do_not_specialize=["num_rows"])
def multiply_few(
    weight_desc,
    x_desc,
    out_ptr,
    bias_ptr,
    num_rows,
    num_outputs,
    depth,
    stride_out_row,
    BLOCK_N: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """out[m, n] for up to COLUMNS rows m; what lies beyond the edges is zeros in the rings and is not stored."""
    weight_ring = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    BEHIND: gl.constexpr = stages_behind(BLOCK_N, COLUMNS, BLOCK_K)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES + BEHIND, COLUMNS, BLOCK_K], x_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 1)
    allow_next_launch()
    steps = (depth + BLOCK_K - 1) // BLOCK_K
    num_tiles = (num_outputs + BLOCK_N - 1) // BLOCK_N
    # fmt: off
    gl.warp_specialize(
        [
            (multiply_tiles, (out_ptr, bias_ptr, weight_ring, x_ring, full, empty, num_rows, num_outputs, num_tiles,
                              steps, stride_out_row, BLOCK_N, COLUMNS, BLOCK_K, STAGES, HAS_BIAS)),
            (stream_tiles, (weight_desc, x_desc, weight_ring, x_ring, full, empty, num_tiles, steps, BLOCK_N, COLUMNS,
                            BLOCK_K, STAGES)),
        ],
        [1],
        [40],
    )
    # fmt: on
