"""grouped_linear for Hopper with stored weights: one program for one tile of an expert's rows and BLOCK_N outputs.

A ring of stages in shared memory is filled ahead: weights by TMA as they are stored, rows of x by asynchronous copies
of 16 bytes, since the rows of a tile lie anywhere. Weights become x's dtype in registers and enter the products from
there.

Each element is the same chain of wgmmas with 16 steps of depth as in the Triton kernel, so it has the same bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.grouped_linear.hopper.weights import (
    BLOCK,
    FP8_BLOCK,
    MX_BLOCK,
    exponents_of_step,
    fp8_operand,
    fp8_words_operand,
    mxfp4_operand,
    words_layout,
)
from kernels.hopper.barriers import make_barriers, thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch


@gluon.jit
def fetch(weight_desc, weights, x_rows, is_row, full, x_tiles, first_row, step, steps, depth):
    """Begins to fill a step's stage; a step beyond the last one is an empty group of copies.

    `first_row` is where the program's weights begin among all rows of the descriptor: words have one for each row and
    BLOCK columns.
    """
    STAGES: gl.constexpr = weights.shape[0]
    STEP: gl.constexpr = x_tiles.shape[2]
    WIDTH: gl.constexpr = weights.shape[2]
    stage = step % STAGES
    if step < steps:
        mbarrier.expect(full.index(stage), weight_desc.block_type.nbytes)
        row, place = first_row, step * WIDTH
        if weights.dtype == gl.int32:
            row, place = first_row + step * STEP // BLOCK * BLOCK, step * STEP % BLOCK * WIDTH // STEP
        tma.async_copy_global_to_shared(weight_desc, [row, place], full.index(stage), weights.index(stage))
        column = step * STEP + gl.arange(0, STEP, gl.SliceLayout(0, x_rows.type.layout))
        async_copy.async_copy_global_to_shared(
            x_tiles.index(stage), x_rows + step * STEP, mask=is_row & (column < depth)[None, :]
        )
    async_copy.commit_group()


@gluon.jit
def multiply_stage(
    weights, x_tile, factors, acc, dtype: gl.constexpr, IS_MXFP4: gl.constexpr, WORDS: gl.constexpr, WAVE: gl.constexpr
):
    """Returns acc plus the products of a stage: all weights first, so that their products follow each other."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, WAVE, 2)
    COLUMNS: gl.constexpr = MX_BLOCK if IS_MXFP4 else 64
    PARTS: gl.constexpr = x_tile.shape[0] // COLUMNS
    operands = ()
    for part in gl.static_range(PARTS):
        if IS_MXFP4:
            operand = mxfp4_operand(weights, part, factors, dtype, WORDS, OPERAND)
        elif weights.dtype == gl.int32:
            operand = fp8_words_operand(weights, part * COLUMNS, factors, dtype, 4, OPERAND)
        else:
            operand = fp8_operand(weights, part * COLUMNS, factors, dtype, OPERAND)
        operands += (operand,)  # type: ignore[assignment]
    for part in gl.static_range(PARTS):
        acc = warpgroup_mma(operands[part], x_tile.slice(part * COLUMNS, COLUMNS, 0), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


# How many pairs there are changes from batch to batch: a new number must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_pairs"])
def multiply_stored(
    weight_desc,
    x_ptr,
    scales_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    num_tiles_ptr,
    out_ptr,
    num_pairs,
    num_outputs,
    num_blocks,
    depth,
    expert_rows,
    stride_x_row,
    stride_scales_expert,
    stride_scales_row,
    stride_bias_expert,
    PAIRS_OF_ROW: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    IS_MXFP4: gl.constexpr,
):
    """`expert_rows` is how many rows of the descriptor lie between two experts' first ones; scales are words of four
    exponents of mxfp4, the factors of fp8 in words."""
    WAVE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_ROWS, 16]
    )
    X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    X_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WORDS: gl.constexpr = words_layout(BLOCK_N, 4)
    WIDTH: gl.constexpr = weight_desc.block_type.shape[1]
    COUNT: gl.constexpr = STEP // MX_BLOCK
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    tile = gl.program_id(0) // num_blocks
    allow_next_launch()
    wait_for_last_launch()
    # Two rounds of loads, not four one after another: places behind the last tile are memory that nobody has written.
    num_tiles = gl.load(num_tiles_ptr)
    expert = gl.load(tiles_ptr + 2 * tile)
    begin = gl.load(tiles_ptr + 2 * tile + 1)
    if tile < num_tiles:
        weights = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, WIDTH], weight_desc.layout)
        x_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_ROWS, STEP], X_TILE)
        full = make_barriers(STAGES, 1)
        fence_async_shared()
        thread_barrier()
        end = gl.load(starts_ptr + expert + 1)
        first_n = gl.program_id(0) % num_blocks * BLOCK_N
        first_row = expert * expert_rows + first_n
        if weights.dtype == gl.int32:
            block_rows = (depth + BLOCK - 1) // BLOCK * BLOCK
            first_row = expert * expert_rows + first_n // BLOCK * block_rows + first_n % BLOCK
        place = begin + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, X))
        pair = gl.load(order_ptr + place, mask=place < num_pairs, other=0)
        is_row = (place < end)[:, None]
        x_rows = x_ptr + (pair // PAIRS_OF_ROW).to(gl.int64)[:, None] * stride_x_row
        x_rows = x_rows + gl.arange(0, STEP, gl.SliceLayout(0, X))[None, :]
        steps = (depth + STEP - 1) // STEP
        for step in gl.static_range(STAGES - 1):
            fetch(weight_desc, weights, x_rows, is_row, full, x_tiles, first_row, step, steps, depth)
        scales = scales_ptr + expert.to(gl.int64) * stride_scales_expert
        if IS_MXFP4:
            n_read = gl.minimum(first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WORDS)), num_outputs - 1)
            scales_row = scales + n_read * stride_scales_row
            words = (depth + 4 * MX_BLOCK - 1) // (4 * MX_BLOCK)
            factors_ahead = exponents_of_step(scales_row, 0, words, COUNT)
        else:
            scales_row = scales + first_n // FP8_BLOCK * stride_scales_row
            factors_ahead = gl.load(scales_row)
        acc = gl.zeros([BLOCK_N, TILE_ROWS], gl.float32, WAVE)
        for step in range(steps):
            stage = step % STAGES
            factors = factors_ahead
            if IS_MXFP4:
                factors_ahead = exponents_of_step(scales_row, step + 1, words, COUNT)
            else:
                factors_ahead = gl.load(scales_row + gl.minimum(step + 1, steps - 1) * STEP // FP8_BLOCK)
            async_copy.wait_group(STAGES - 2)
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            fence_async_shared()
            thread_barrier()
            # The stage before this one is free: all warps have waited for its products.
            fetch(weight_desc, weights, x_rows, is_row, full, x_tiles, first_row, step + STAGES - 1, steps, depth)
            x_tile = x_tiles.index(stage).permute((1, 0))
            acc = multiply_stage(weights.index(stage), x_tile, factors, acc, dtype, IS_MXFP4, WORDS, WAVE)
        if HAS_BIAS:
            n = gl.minimum(first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WAVE)), num_outputs - 1)
            acc += gl.load(bias_ptr + expert.to(gl.int64) * stride_bias_expert + n).to(gl.float32)[:, None]
        store_rows(out_ptr, order_ptr, acc.to(out_ptr.dtype.element_ty), begin, end, first_n, num_outputs)


@gluon.jit
def store_rows(out_ptr, order_ptr, values, begin, end, first_n, num_outputs):
    """Stores values [outputs, rows] in the rows of their pairs; what is beyond the tile's rows or outputs is not."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    place = begin + gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    n = first_n + gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))
    pair = gl.load(order_ptr + place, mask=place < end, other=0)
    out = out_ptr + pair.to(gl.int64)[None, :] * num_outputs + n[:, None]
    mask = (place < end)[None, :] & (n < num_outputs)[:, None]
    gl.store(out, gl.convert_layout(values, LAYOUT), mask=mask)
