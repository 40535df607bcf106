"""solve_channels in Gluon for Hopper: what kernels/gated_delta_scan/channels/triton.py computes.

Left operands of products stay in registers; a level's decayed keys are stored in shared memory once for both of its
products. For keys of 128 elements that are divided by their length.
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
from kernels.gated_delta_scan.hopper.kernel import store_rows, unit_lower_inverse
from kernels.hopper.barriers import make_barriers, thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.hopper.registers import opaque_zero
from kernels.softmax import LOG2_E

_GRID = gl.constexpr(GRID_TOKENS)
_LEVELS = gl.constexpr(GRID_TOKENS.bit_length() - 1)
# A log2 decay below this is taken as this: 2 to it is 0 as well, but 0 times it is no NaN, and fp16 holds it.
_LEAST = gl.constexpr(-60000.0)
_LOG2_E = gl.constexpr(LOG2_E)


@gluon.jit
def norm_rows(tile, halves, norm_eps, L: gl.constexpr):
    """Writes rows of `tile`, divided by their lengths, as fp16 to `halves`, which is the same memory; returns them."""
    rows = tile.load(L).to(gl.float32)
    rows *= gl.rsqrt(gl.sum(rows * rows, 1) + norm_eps)[:, None]
    halves.store(rows.to(gl.float16))
    return rows


@gluon.jit
def norm_inputs(qs, ks, diagonal, count, norm_eps, PART: gl.constexpr, DK: gl.constexpr):
    """Divides queries and keys [GRID, DK] by their lengths, in place. Returns the two tiles as fp16.

    `diagonal` gets the product of each token's query with its own key, in fp32. PART rows at a time, to take few
    registers. Parts behind the block's `count` tokens stay as they are: their keys are zeros, and no output is made of
    their queries.
    """
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DK, DK // 8], [4, 1], [1, 0])
    q = qs._reinterpret(gl.float16, [_GRID, DK], qs.layout)
    k = ks._reinterpret(gl.float16, [_GRID, DK], ks.layout)
    for part in gl.static_range(_GRID // PART):
        if part * PART < count:
            keys = norm_rows(ks.slice(part * PART, PART, 0), k.slice(part * PART, PART, 0), norm_eps, WIDE)
            queries = norm_rows(qs.slice(part * PART, PART, 0), q.slice(part * PART, PART, 0), norm_eps, WIDE)
            diagonal.slice(part * PART, PART, 0).store(gl.sum(queries * keys, 1))
    return q, k


@gluon.jit
def load_exponents(highs, lows, g_ptr, remains_ptr, first, count, stride_g, PART: gl.constexpr, DK: gl.constexpr):
    """Loads log decays; `highs` and `lows` get the upper and lower half of log2 decays, fp16 [GRID, DK].

    Stores what the block leaves of the state before it, fp32 [DK].
    """
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [128 // DK, DK // 4], [4, 1], [1, 0])
    d = gl.arange(0, DK, gl.SliceLayout(0, WIDE))
    total = gl.zeros([DK], gl.float32, gl.SliceLayout(0, WIDE))
    for part in gl.static_range(_GRID // PART):
        token = part * PART + gl.arange(0, PART, gl.SliceLayout(1, WIDE))
        at = (first + token).to(gl.int64) * stride_g
        ok = (token < count)[:, None] & (d >= 0)[None, :]
        g = gl.load(g_ptr + at[:, None] + d[None, :], mask=ok, other=0.0).to(gl.float32) * _LOG2_E
        g = gl.where(g < _LEAST, _LEAST, g)
        high = g.to(gl.float16)
        highs.slice(part * PART, PART, 0).store(high)
        lows.slice(part * PART, PART, 0).store((g - high.to(gl.float32)).to(gl.float16))
        total += gl.sum(g, 0)
    gl.store(remains_ptr + d, gl.exp2(total))


@gluon.jit
def ones_at(mask):
    """Returns fp16 ones where the mask is set, else zeros: times a tile, they sum the tile's rows that it selects."""
    return gl.where(mask, 1.0, 0.0).to(gl.float16)


@gluon.jit
def levels_of(count):
    """Returns how many levels the pairs of `count` tokens have: those with halves of fewer tokens."""
    levels = 0
    for level in gl.static_range(_LEVELS):
        levels += (count > (1 << level)).to(gl.int32)
    return levels


@gluon.jit
def start_level_sums(highs, level, DK: gl.constexpr, DL: gl.constexpr):
    """Starts the sums [GRID, DK] of log2 decays between each token and the middle of its part of the block.

    At a level parts have two halves of 2^level tokens. The caller waits for the result.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=DL, k_width=2)
    i = gl.arange(0, _GRID, gl.SliceLayout(1, LEFT))[:, None]
    j = gl.arange(0, _GRID, gl.SliceLayout(0, LEFT))[None, :]
    # Tokens of the same half: in a second half those up to the token, in a first one those behind it.
    half = i >> level
    is_second = half & 1 != 0
    begin = gl.where(is_second, half << level, i + 1)
    end = gl.where(is_second, i + 1, (half + 1) << level)
    zeros = gl.zeros([_GRID, DK], gl.float32, DL)
    return warpgroup_mma(ones_at((j >= begin) & (j < end)), highs, zeros, use_acc=False, is_async=True)


@gluon.jit
def exact_decays(highs, lows, BEFORE: gl.constexpr, DK: gl.constexpr, DL: gl.constexpr):
    """Returns decays, fp32 [GRID, DK]: from the block's begin through each token, or else from behind it to the end."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=DL, k_width=2)
    i = gl.arange(0, _GRID, gl.SliceLayout(1, LEFT))[:, None]
    j = gl.arange(0, _GRID, gl.SliceLayout(0, LEFT))[None, :]
    # If ptxas 12.8 knows that a register of a left operand is 0 or 1, it may write it after the wgmma that reads it.
    i += opaque_zero()
    ones = ones_at(j <= i if BEFORE else j > i)
    zeros = gl.zeros([_GRID, DK], gl.float32, DL)
    sums = warpgroup_mma(ones, highs, zeros, use_acc=False, is_async=True)
    sums = warpgroup_mma(ones, lows, sums, is_async=True)
    return gl.exp2(warpgroup_mma_wait(0, deps=[sums]))


@gluon.jit
def store_wide(ptr, rows, staging, first, count, HEADS: gl.constexpr, DK: gl.constexpr):
    """Stores [GRID, DK] of one head, 16 bytes a thread."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DK, DK // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = ptr.dtype.element_ty
    tile = staging._reinterpret(dtype, [_GRID, DK], staging.layout)
    tile.store(rows.to(dtype))
    thread_barrier()
    token = gl.arange(0, _GRID, gl.SliceLayout(1, WIDE))
    d = gl.arange(0, DK, gl.SliceLayout(0, WIDE))
    at = (first + token).to(gl.int64) * (HEADS * DK)
    gl.store(ptr + at[:, None] + d[None, :], tile.load(WIDE), mask=(token < count)[:, None] & (d >= 0)[None, :])


@gluon.jit
def add_levels(products, scores, q, k, highs, tiles, count, DK: gl.constexpr, TL: gl.constexpr, DL: gl.constexpr):
    """Adds what some channels give of all pairs of a block's `count` tokens: of each level those whose tokens lie in
    two halves of one part."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=TL, k_width=2)
    i = gl.arange(0, _GRID, gl.SliceLayout(1, TL))[:, None]
    j = gl.arange(0, _GRID, gl.SliceLayout(0, TL))[None, :]
    zeros = gl.zeros([_GRID, _GRID], gl.float32, TL)
    for level in range(levels_of(count)):
        sums = warpgroup_mma_wait(0, deps=[start_level_sums(highs, level, DK, DL)])
        near = gl.convert_layout(gl.exp2(sums).to(gl.float16), LEFT)
        keys = k.load(LEFT) * near
        # No thread reads any more what lies there: of two levels ago, or of the stores before.
        tile = tiles.index(level % 2)
        tile.store(keys)
        fence_async_shared()
        thread_barrier()
        added = warpgroup_mma(keys, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        read = warpgroup_mma(q.load(LEFT) * near, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        added, read = warpgroup_mma_wait(0, deps=[added, read])
        # The second token lies in a second half, the first one in the half before that.
        half = i >> level
        is_pair = j >> level == gl.where(half & 1 != 0, half - 1, -1)
        products += gl.where(is_pair, added, 0.0)
        scores += gl.where(is_pair, read, 0.0)
    return products, scores


@gluon.jit
def store_decayed(
    kept_ptr, keys_ptr, reading_ptr, q, k, highs, lows, staging, first, count,
    HEADS: gl.constexpr, DK: gl.constexpr, DL: gl.constexpr,
):  # fmt: skip
    """Stores keys by what is left of them behind the block, keys and queries by what is left there of the state before
    it. Pointers are to the head's first element."""
    decays = exact_decays(highs, lows, False, DK, DL)
    store_wide(kept_ptr, k.load(DL).to(gl.float32) * decays, staging, first, count, HEADS, DK)
    decays = exact_decays(highs, lows, True, DK, DL)
    thread_barrier()
    store_wide(keys_ptr, k.load(DL).to(gl.float32) * decays, staging, first, count, HEADS, DK)
    store_wide(reading_ptr, q.load(DL).to(gl.float32) * decays, lows, first, count, HEADS, DK)


@gluon.jit
def store_pairs(
    inverses_ptr, scores_ptr, products, scores, beta, highs, tiles, first, count, head,
    HEADS: gl.constexpr, DTYPE: gl.constexpr, TL: gl.constexpr,
):  # fmt: skip
    """Stores a block's scores, and the inverse that products of its keys make with `beta`. Writes over `highs` and
    `tiles`."""
    thread_barrier()
    a = products * beta.to(gl.float32)[:, None]
    rows = highs._reinterpret(gl.float16, [_GRID, _GRID], highs.layout)
    rows.store(a.to(gl.float16))
    fence_async_shared()
    thread_barrier()
    store_rows(scores_ptr, scores.to(DTYPE), first, count, head, HEADS)
    inverse = unit_lower_inverse(a, rows, tiles._reinterpret(gl.float16, [2, _GRID, _GRID], tiles.layout), count, TL)
    store_rows(inverses_ptr, inverse.to(DTYPE), first, count, head, HEADS)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_rows"])
def solve_channels(
    q_desc, k_desc, g_ptr, beta_ptr, inverses_ptr, scores_ptr, reading_ptr, keys_ptr, kept_ptr, remains_ptr,
    cu_blocks_ptr, blocks_ptr, num_rows, norm_eps, stride_g, stride_beta,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DK: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    TL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _GRID, 16])
    DL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DK, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, TL)
    COLUMN: gl.constexpr = gl.SliceLayout(0, TL)
    DTYPE: gl.constexpr = q_desc.dtype
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
        diagonal = gl.allocate_shared_memory(gl.float32, [_GRID], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        highs = gl.allocate_shared_memory(gl.float16, [_GRID, DK], TILE)
        tiles = gl.allocate_shared_memory(gl.float16, [2, _GRID, DK], TILE)
        lows = tiles.index(1)
        mbarrier.expect(full.index(0), 2 * 2 * _GRID * DK)
        tma.async_copy_global_to_shared(k_desc, [first, head // GROUP * DK], full.index(0), ks)
        tma.async_copy_global_to_shared(q_desc, [first, head // GROUP * DK], full.index(0), qs)
        at = head * DK
        remains = remains_ptr + block.to(gl.int64) * HEADS * DK + at
        load_exponents(highs, lows, g_ptr + at, remains, first, count, stride_g, 32, DK)
        i = gl.arange(0, _GRID, ROW)
        beta = gl.load(beta_ptr + (first + i).to(gl.int64) * stride_beta + head, mask=i < count, other=0.0)
        mbarrier.wait(full.index(0), 0)
        clear_tail(ks, count, DK)
        q, k = norm_inputs(qs, ks, diagonal, count, norm_eps, 32, DK)
        fence_async_shared()
        thread_barrier()
        j = gl.arange(0, _GRID, COLUMN)
        products = gl.zeros([_GRID, _GRID], gl.float32, TL)
        scores = gl.where(i[:, None] == j[None, :], diagonal.load(ROW)[:, None], 0.0)
        store_decayed(
            kept_ptr + at, keys_ptr + at, reading_ptr + at, q, k, highs, lows, tiles.index(0), first, count,
            HEADS, DK, DL,
        )  # fmt: skip
        products, scores = add_levels(products, scores, q, k, highs, tiles, count, DK, TL, DL)
        store_pairs(
            inverses_ptr, scores_ptr, products, scores, beta, highs, tiles, first, count, head, HEADS, DTYPE, TL
        )
