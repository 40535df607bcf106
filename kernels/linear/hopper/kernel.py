"""linear in Gluon for Hopper where rows are few: the weights are read once, at the speed of memory.

The weights are the rows of the products and the few rows of x their columns (W x'), so that nothing is computed in
vain. An output is one chain of products in ascending order of the depth, 16 columns at a time, whatever the tile: the
bits of the TILED route, and of the library's GEMM where that was seen to keep its rows.

    program    takes tiles of outputs, a launch's number of programs apart
    producer   one warp; weights and rows of x into a ring, on from tile to tile. The first weights are asked for while
               the launch before this one ends: no launch writes them
    consumer   multiplies and stores
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import make_barriers
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch


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
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    n_in_tile = gl.arange(0, BLOCK_N, gl.SliceLayout(1, L))
    m = gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        acc = gl.zeros([BLOCK_N, COLUMNS], gl.float32, L)
        for i in range(steps):
            at = step % STAGES
            mbarrier.wait(full.index(at), (step // STAGES) & 1)
            acc = warpgroup_mma(weight_ring.index(at), x_ring.index(at).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            # The product before this one has read its stage.
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        n = tile * BLOCK_N + n_in_tile
        if HAS_BIAS:
            acc += gl.load(bias_ptr + gl.minimum(n, num_outputs - 1)).to(gl.float32)[:, None]
        target = out_ptr + m.to(gl.int64)[None, :] * stride_out_row + n[:, None]
        gl.store(target, acc.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[None, :] & (n < num_outputs)[:, None])


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
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, BLOCK_K], x_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 1)
    allow_next_launch()
    steps = (depth + BLOCK_K - 1) // BLOCK_K
    num_tiles = (num_outputs + BLOCK_N - 1) // BLOCK_N
    # fmt: off
    gl.warp_specialize(
        [
            (multiply_tiles, (out_ptr, bias_ptr, weight_ring, x_ring, full, empty, num_rows, num_outputs, num_tiles,
                              steps, stride_out_row, BLOCK_N, COLUMNS, STAGES, HAS_BIAS)),
            (stream_tiles, (weight_desc, x_desc, weight_ring, x_ring, full, empty, num_tiles, steps, BLOCK_N, COLUMNS,
                            BLOCK_K, STAGES)),
        ],
        [1],
        [40],
    )
    # fmt: on
