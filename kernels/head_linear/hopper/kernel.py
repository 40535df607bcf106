"""head_linear in Gluon for Hopper, for few tokens: a launch takes as long as reading the matrices.

A head's columns are the rows of the products and tokens their columns, so that little is computed in vain. An output is
one chain of products in ascending order of the depth: the bits of the Triton kernel. Matrices are on their way while
the launch before this one ends: no launch writes them. Of 16 heads, queries into the latents' space take one program a
multiprocessor, of 33 KB, so that those of mla_decode have room beside them and ask for their first latents meanwhile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch


@gluon.jit
def copy_carried(
    from_ptr,
    to_ptr,
    num_tokens,
    stride_from,
    stride_to,
    TOKENS: gl.constexpr,
    CARRIED: gl.constexpr,
    BLOCK_C: gl.constexpr,
):
    """Copies this program's part of the columns that rows carry."""
    LANES: gl.constexpr = BLOCK_C if BLOCK_C < 32 else 32
    L: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [4, 1], [1, 0])
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, L))[:, None]
    column = gl.program_id(0) * BLOCK_C + gl.arange(0, BLOCK_C, gl.SliceLayout(0, L))[None, :]
    mask = (token < num_tokens) & (column < CARRIED)
    gl.store(
        to_ptr + token * stride_to + column, gl.load(from_ptr + token * stride_from + column, mask=mask), mask=mask
    )


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_tokens"])
def multiply_few_tokens(
    x_ptr, weight_ptr, out_ptr, num_tokens, stride_x_token, stride_x_head, stride_weight_head, stride_weight_row,
    stride_out_token, stride_out_head,
    K: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, CARRIED: gl.constexpr,
    BLOCK_C: gl.constexpr, BY_COLUMN: gl.constexpr,
):  # fmt: skip
    """Programs [blocks of columns, heads]. Rows of a matrix are its columns where BY_COLUMN, else the depth.

    Each copies BLOCK_C of the columns that its head's rows carry.
    """
    allow_next_launch()
    STEPS: gl.constexpr = K // 64
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16])
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    head = gl.program_id(1).to(gl.int64)
    first = gl.program_id(0) * BLOCK_N
    x_ptr += head * stride_x_head
    out_ptr += head * stride_out_head
    column = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, L))[:, None]
    weight = gl.allocate_shared_memory(
        DTYPE, [STEPS, BLOCK_N, 64] if BY_COLUMN else [STEPS * (BLOCK_N // 64), 64, 64], TILES
    )
    x = gl.allocate_shared_memory(DTYPE, [STEPS, TOKENS, 64], TILES)
    weight_ptr += head * stride_weight_head
    if BY_COLUMN:
        row = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, L))[:, None]
        for step in gl.static_range(STEPS):
            from_ptr = weight_ptr + row * stride_weight_row + (step * 64 + column)
            async_copy.async_copy_global_to_shared(weight.index(step), from_ptr)
    else:
        row = gl.arange(0, 64, gl.SliceLayout(1, L))[:, None]
        for step in gl.static_range(STEPS):
            from_ptr = weight_ptr + (step * 64 + row) * stride_weight_row + first + column
            async_copy.async_copy_global_to_shared(weight.index(step), from_ptr)
    wait_for_last_launch()
    for step in gl.static_range(STEPS):
        from_ptr = x_ptr + token * stride_x_token + step * 64 + column
        async_copy.async_copy_global_to_shared(x.index(step), from_ptr, mask=token < num_tokens)
    async_copy.commit_group()
    if CARRIED:
        copy_carried(x_ptr + K, out_ptr + N, num_tokens, stride_x_token, stride_out_token, TOKENS, CARRIED, BLOCK_C)
    async_copy.wait_group(0)
    thread_barrier()
    fence_async_shared()
    sums = gl.zeros([BLOCK_N, TOKENS], gl.float32, SUMS)
    for step in gl.static_range(STEPS):
        rows = weight.index(step)
        if not BY_COLUMN:
            rows = rows.permute((1, 0))
        sums = warpgroup_mma(rows, x.index(step).permute((1, 0)), sums, use_acc=step > 0, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    narrow = gl.convert_layout(sums.to(DTYPE), OUT)
    at = gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))[:, None]
    token_out = gl.arange(0, TOKENS, gl.SliceLayout(0, OUT))[None, :]
    to_ptr = out_ptr + token_out * stride_out_token + first + at
    gl.store(to_ptr, narrow, mask=(token_out < num_tokens) & (at < BLOCK_N))
