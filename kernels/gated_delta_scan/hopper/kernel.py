"""solve_blocks in Gluon for Hopper: left factors stay in registers, what is multiplied again is stored once.

As kernels/gated_delta_scan/triton.py: scores and inverses of all blocks at once, a program for a block and a head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.block_scan.hopper.rows import clear_tail
from kernels.block_scan.plan import GRID_TOKENS
from kernels.hopper.barriers import make_barriers, thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch

_GRID = gl.constexpr(GRID_TOKENS)


@gluon.jit
def times(left, right, zeros, LEFT: gl.constexpr):
    """Starts left @ right of an fp32 left factor, taken as fp16, and a tile in shared memory."""
    return warpgroup_mma(gl.convert_layout(left.to(gl.float16), LEFT), right, zeros, use_acc=False, is_async=True)


@gluon.jit
def double_blocks(inverse, rows, inverses, level: gl.constexpr, TL: gl.constexpr):
    """Returns `inverse` with blocks of 8 << level where it has blocks of half that size."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=TL, k_width=2)
    zeros = gl.zeros([_GRID, _GRID], gl.float32, TL)
    i = gl.arange(0, _GRID, gl.SliceLayout(1, TL))[:, None]
    j = gl.arange(0, _GRID, gl.SliceLayout(0, TL))[None, :]
    through = times(inverse, rows, zeros, LEFT)
    inverses.index(level % 2).store(inverse.to(gl.float16))
    fence_async_shared()
    thread_barrier()
    through = warpgroup_mma_wait(0, deps=[through])
    is_pair = (i // (8 << level) == j // (8 << level)) & (i // (4 << level) != j // (4 << level))
    through = gl.where(is_pair, through, 0.0)
    return inverse - warpgroup_mma_wait(0, deps=[times(through, inverses.index(level % 2), zeros, LEFT)])


@gluon.jit
def unit_lower_inverse(a, rows, inverses, count, TL: gl.constexpr):
    """Returns (I + a)^-1 of a strictly lower a; `rows` is its fp16 copy in shared memory, `inverses` are two tiles.

    Blocks of 4 are I - a + a^2 - a^3, since a^4 = 0 there; then blocks double, as in Triton. A product of
    block-diagonal rows with all of `a`, masked afterwards, is that with a masked `a`: one copy does. Rows of `a` from
    `count` on are zeros: with 16 tokens the last two levels would subtract zeros alone, and are left out.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=TL, k_width=2)
    zeros = gl.zeros([_GRID, _GRID], gl.float32, TL)
    i = gl.arange(0, _GRID, gl.SliceLayout(1, TL))[:, None]
    j = gl.arange(0, _GRID, gl.SliceLayout(0, TL))[None, :]
    within = i // 4 == j // 4
    first = gl.where(within, a, 0.0)
    second = warpgroup_mma_wait(0, deps=[times(first, rows, zeros, LEFT)])
    second = gl.where(within, second, 0.0)
    third = warpgroup_mma_wait(0, deps=[times(second, rows, zeros, LEFT)])
    inverse = gl.where(i == j, 1.0, 0.0) - first + second - gl.where(within, third, 0.0)
    for level in gl.static_range(2):
        inverse = double_blocks(inverse, rows, inverses, level, TL)
    if count > 16:
        for level in gl.static_range(2, 4):
            inverse = double_blocks(inverse, rows, inverses, level, TL)
    return inverse


@gluon.jit
def store_rows(ptr, tile, first, count, head, HEADS: gl.constexpr):
    """Stores [GRID, GRID] of one head, 16 bytes a thread."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    wide = gl.convert_layout(tile, WIDE)
    token = gl.arange(0, _GRID, gl.SliceLayout(1, WIDE))
    at = ((first + token).to(gl.int64) * HEADS + head) * _GRID
    column = gl.arange(0, _GRID, gl.SliceLayout(0, WIDE))
    gl.store(ptr + at[:, None] + column[None, :], wide, mask=(token < count)[:, None] & (column >= 0)[None, :])


@gluon.jit
def store_query_lengths(ptr, qs, first, count, head, norm_eps, HEADS: gl.constexpr, DK: gl.constexpr):
    """Stores 1 / |q| of a block's tokens."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DK, DK // 8], [4, 1], [1, 0])
    wide = qs.load(WIDE).to(gl.float32)
    length = gl.rsqrt(gl.sum(wide * wide, 1) + norm_eps)
    token = gl.arange(0, _GRID, gl.SliceLayout(1, WIDE))
    gl.store(ptr + (first + token).to(gl.int64) * HEADS + head, length, mask=token < count)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_rows", "stride_lengths"])
def solve_blocks(
    q_desc, k_desc, g_ptr, beta_ptr, inverses_ptr, scores_ptr, sums_ptr, lengths_ptr, cu_blocks_ptr, blocks_ptr,
    num_rows, norm_eps, stride_g, stride_beta, stride_lengths,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DK: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    TL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _GRID, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, TL)
    COLUMN: gl.constexpr = gl.SliceLayout(0, TL)
    block = gl.program_id(0) // HEADS
    head = gl.program_id(0) % HEADS
    full = make_barriers(1, 1)
    allow_next_launch()
    wait_for_last_launch()
    # At once: behind the last block lies any number.
    first = gl.load(blocks_ptr + block * 2)
    count = gl.load(blocks_ptr + block * 2 + 1)
    if block < gl.load(cu_blocks_ptr + num_rows):
        qs = gl.allocate_shared_memory(DTYPE, [_GRID, DK], q_desc.layout)
        ks = gl.allocate_shared_memory(DTYPE, [_GRID, DK], k_desc.layout)
        rows = gl.allocate_shared_memory(gl.float16, [_GRID, _GRID], TILE)
        # Queries are gone when inverses come.
        gl.static_assert(DK == 128)
        inverses = qs._reinterpret(gl.float16, [2, _GRID, _GRID], TILE)
        mbarrier.expect(full.index(0), 2 * 2 * _GRID * DK)
        tma.async_copy_global_to_shared(k_desc, [first, head // GROUP * DK], full.index(0), ks)
        tma.async_copy_global_to_shared(q_desc, [first, head // GROUP * DK], full.index(0), qs)
        i = gl.arange(0, _GRID, ROW)
        j = gl.arange(0, _GRID, COLUMN)
        g = gl.load(g_ptr + (first + j).to(gl.int64) * stride_g + head, mask=j < count, other=0.0).to(gl.float32)
        of_head = (first + i).to(gl.int64) * HEADS + head
        beta = gl.load(beta_ptr + (first + i).to(gl.int64) * stride_beta + head, mask=i < count, other=0.0)
        lower = i[:, None] >= j[None, :]
        sums = gl.sum(gl.where(lower, g[None, :], 0.0), 1)
        gl.store(sums_ptr + of_head, sums, mask=i < count)
        zeros = gl.zeros([_GRID, _GRID], gl.float32, TL)
        mbarrier.wait(full.index(0), 0)
        clear_tail(ks, count, DK)
        scores = warpgroup_mma(qs, ks.permute((1, 0)), zeros, use_acc=False, is_async=True)
        products = warpgroup_mma(ks, ks.permute((1, 0)), zeros, use_acc=False, is_async=True)
        store_query_lengths(lengths_ptr + stride_lengths, qs, first, count, head, norm_eps, HEADS, DK)
        before = gl.convert_layout(sums, COLUMN)
        decay = gl.exp(gl.where(lower, sums[:, None] - before[None, :], float("-inf")))
        scores, products = warpgroup_mma_wait(0, deps=[scores, products])
        squares = gl.sum(gl.where(i[:, None] == j[None, :], products, 0.0), 1)
        length = gl.rsqrt(squares + norm_eps)
        gl.store(lengths_ptr + of_head, length, mask=i < count)
        decay = decay * gl.convert_layout(length, COLUMN)[None, :]
        a = gl.where(i[:, None] > j[None, :], products * decay, 0.0) * (beta.to(gl.float32) * length)[:, None]
        rows.store(a.to(gl.float16))
        fence_async_shared()
        thread_barrier()
        store_rows(scores_ptr, (scores * decay).to(DTYPE), first, count, head, HEADS)
        inverse = unit_lower_inverse(a, rows, inverses, count, TL)
        store_rows(inverses_ptr, inverse.to(DTYPE), first, count, head, HEADS)
