"""linear in fp32 in Gluon for Hopper, for few rows: products of one slice of the depth.

Each element of a slice is one chain of fused multiply-adds in ascending order, as in `multiply_slices`, whose bits it
has. Its weights are on their way while the launch before this one ends: no launch writes them. Rows are widened once,
behind the wait; there is no transpose. Both lie in blocks of 32 columns in shared memory, 128 bytes a row, whose chunks
of 16 bytes are swizzled by patch: lanes read rows as they lie, four columns at a time, without a bank conflict.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch


# The number of rows changes from batch to batch: a new one must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_rows"])
def multiply_few_slices(
    x_ptr,
    weight_ptr,
    partials_ptr,
    num_rows,
    num_outputs,
    depth,
    width,
    stride_x_row,
    stride_weight_row,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PATCH_N: gl.constexpr,
    PATCH_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SLICE_K: gl.constexpr,
):
    """Programs [blocks of outputs, slices]: partials [slices, num_outputs, width] of up to ROWS rows.

    Outputs beyond the edge repeat the last one and are not stored; rows and columns beyond it are zeros.
    """
    allow_next_launch()
    BLOCKS: gl.constexpr = SLICE_K // BLOCK_K
    LANES: gl.constexpr = BLOCK_N // PATCH_N
    SUMS: gl.constexpr = gl.BlockedLayout([PATCH_N, PATCH_M], [LANES, 32 // LANES], [1, gl.num_warps()], [1, 0])
    COPIES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [gl.num_warps(), 1, 1], [2, 1, 0])
    ALONG_ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, COPIES))
    weights = gl.allocate_shared_memory(
        gl.float32, [BLOCKS, BLOCK_N, BLOCK_K], gl.SwizzledSharedLayout(4, PATCH_N, 8, [1, 0])
    )
    rows = gl.allocate_shared_memory(
        gl.float32, [BLOCKS, ROWS, BLOCK_K], gl.SwizzledSharedLayout(4, PATCH_M, 8, [1, 0])
    )
    # The same memory, all blocks at once: stores block by block would have a barrier between any two.
    all_weights = weights._reinterpret(
        gl.float32, [BLOCKS, BLOCK_N, BLOCK_K], gl.SwizzledSharedLayout(4, PATCH_N, 8, [2, 1, 0])
    )
    all_rows = rows._reinterpret(gl.float32, [BLOCKS, ROWS, BLOCK_K], gl.SwizzledSharedLayout(4, PATCH_M, 8, [2, 1, 0]))
    first = gl.program_id(1) * SLICE_K
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, COPIES)))[:, None, None]
    column = (
        first + block * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(1, COPIES)))[None, None, :]
    )
    n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, ALONG_ROWS)[None, :, None]
    m = gl.arange(0, ROWS, ALONG_ROWS)[None, :, None]
    from_weights = weight_ptr + gl.minimum(n, num_outputs - 1).to(gl.int64) * stride_weight_row + column
    async_copy.async_copy_global_to_shared(all_weights, from_weights, mask=column < depth)
    async_copy.commit_group()
    wait_for_last_launch()
    from_rows = x_ptr + m.to(gl.int64) * stride_x_row + column
    all_rows.store(gl.load(from_rows, mask=(m < num_rows) & (column < depth), other=0.0).to(gl.float32))
    async_copy.wait_group(0)
    thread_barrier()
    sums = gl.zeros([BLOCK_N, ROWS], gl.float32, SUMS)
    # As many blocks as `multiply_slices` has: a product of zeros turns a sum of -0 into 0.
    for i in range(gl.minimum((depth - first + BLOCK_K - 1) // BLOCK_K, BLOCKS)):
        left = weights.index(i).load(gl.DotOperandLayout(0, SUMS, 0))
        right = rows.index(i).permute((1, 0)).load(gl.DotOperandLayout(1, SUMS, 0))
        sums = gl.dot_fma(left, right, sums)
    n_out = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))[:, None]
    m_out = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))[None, :]
    target = partials_ptr + (gl.program_id(1) * num_outputs + n_out) * width + m_out
    gl.store(target, sums, mask=n_out < num_outputs)
