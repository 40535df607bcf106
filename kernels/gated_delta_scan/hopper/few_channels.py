"""solve_channels for launches of few blocks: two programs for a block and head, which end sooner than one.

    pairs   scores and inverses: all that takes one product after the other
    rows    what reads the state before the block, what is kept behind it: `store_decayed`

Each loads and norms what it needs. Where a block has at most 16 tokens, its levels are one product of 64 rows, 16 for
each level: a row of a product has the same bits wherever it lies. Other values are made as in `channels`, in the order
they are made there.

How many blocks there are is known on the device alone: a captured launch of 16 tokens has room for 16. Where two
programs for each would not be on the card at once, `pairs` do both parts.
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
from kernels.gated_delta_scan.hopper.channels import (
    add_levels,
    norm_inputs,
    ones_at,
    store_decayed,
    store_pairs,
)
from kernels.hopper.barriers import make_barriers, thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.hopper.registers import opaque_zero
from kernels.softmax import LOG2_E

# Programs for a block and a head.
PARTS = 2
# Tokens of a block whose levels are one product: 16 rows for each of 4 levels.
STACKED_TOKENS = 16

_GRID = gl.constexpr(GRID_TOKENS)
_PARTS = gl.constexpr(PARTS)
_TOKENS = gl.constexpr(STACKED_TOKENS)
_SHIFT = gl.constexpr(STACKED_TOKENS.bit_length() - 1)
# As in `channels`.
_LEAST = gl.constexpr(-60000.0)
_LOG2_E = gl.constexpr(LOG2_E)


@gluon.jit
def load_decays(g_ptr, first, count, begin, stride_g, PART: gl.constexpr, DK: gl.constexpr, L: gl.constexpr):
    """Returns log decays [PART, DK] of a block's tokens from `begin` on, zeros behind the last one."""
    token = begin + gl.arange(0, PART, gl.SliceLayout(1, L))
    d = gl.arange(0, DK, gl.SliceLayout(0, L))
    at = (first + token).to(gl.int64) * stride_g
    ok = (token < count)[:, None] & (d >= 0)[None, :]
    return gl.load(g_ptr + at[:, None] + d[None, :], mask=ok, other=0.0)


@gluon.jit
def store_exponents(highs, lows, g, total, makes_rows):
    """`highs` and `lows` get the halves of log2 decays, as in `load_exponents`; returns `total` with their sum."""
    g = g.to(gl.float32) * _LOG2_E
    g = gl.where(g < _LEAST, _LEAST, g)
    high = g.to(gl.float16)
    highs.store(high)
    if makes_rows:
        lows.store((g - high.to(gl.float32)).to(gl.float16))
        total += gl.sum(g, 0)
    return total


@gluon.jit
def repeated(rows, DK: gl.constexpr):
    """Returns [GRID, DK]: the 16 rows once for each level."""
    TIMES: gl.constexpr = _GRID // _TOKENS
    rows = rows.reshape([1, _TOKENS, DK])
    WIDE: gl.constexpr = rows.type.layout
    rows, _ = gl.broadcast(rows, gl.zeros([TIMES, _TOKENS, DK], rows.dtype, WIDE))
    return rows.reshape([_GRID, DK])


@gluon.jit
def norm_few_inputs(qs, ks, diagonal, count, norm_eps, DK: gl.constexpr):
    """As `norm_inputs`, for at most 16 tokens; the two tiles hold them once for each level. Tokens that are not there
    are zeros."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DK, DK // 8], [4, 1], [1, 0])
    q = qs._reinterpret(gl.float16, [_GRID, DK], qs.layout)
    k = ks._reinterpret(gl.float16, [_GRID, DK], ks.layout)
    ok = (gl.arange(0, _TOKENS, gl.SliceLayout(1, WIDE)) < count)[:, None]
    keys = gl.where(ok, ks.slice(0, _TOKENS, 0).load(WIDE), 0.0).to(gl.float32)
    queries = gl.where(ok, qs.slice(0, _TOKENS, 0).load(WIDE), 0.0).to(gl.float32)
    keys *= gl.rsqrt(gl.sum(keys * keys, 1) + norm_eps)[:, None]
    queries *= gl.rsqrt(gl.sum(queries * queries, 1) + norm_eps)[:, None]
    diagonal.slice(0, _TOKENS, 0).store(gl.sum(queries * keys, 1))
    k.store(repeated(keys.to(gl.float16), DK))
    q.store(repeated(queries.to(gl.float16), DK))
    return q, k


@gluon.jit
def start_stacked_sums(highs, DK: gl.constexpr, DL: gl.constexpr):
    """Starts sums as `start_level_sums` does, those of 16 tokens at level 0 in the first 16 rows, and so on."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=DL, k_width=2)
    # As in `exact_decays`: of tokens from 16 on all registers of the left operand are 0.
    row = gl.arange(0, _GRID, gl.SliceLayout(1, LEFT))[:, None] + opaque_zero()
    j = gl.arange(0, _GRID, gl.SliceLayout(0, LEFT))[None, :]
    level = row >> _SHIFT
    i = row & (_TOKENS - 1)
    half = i >> level
    is_second = half & 1 != 0
    begin = gl.where(is_second, half << level, i + 1)
    end = gl.where(is_second, i + 1, (half + 1) << level)
    zeros = gl.zeros([_GRID, DK], gl.float32, DL)
    return warpgroup_mma(ones_at((j >= begin) & (j < end)), highs, zeros, use_acc=False, is_async=True)


@gluon.jit
def unstacked(product, TL: gl.constexpr):
    """Returns [GRID, GRID]: of each level of a stacked product the pairs that are its own, in the rows and columns of
    their tokens; zeros elsewhere."""
    TIMES: gl.constexpr = _GRID // _TOKENS
    row = gl.arange(0, _GRID, gl.SliceLayout(1, TL))[:, None]
    column = gl.arange(0, _GRID, gl.SliceLayout(0, TL))[None, :]
    level = row >> _SHIFT
    half = (row & (_TOKENS - 1)) >> level
    j = column & (_TOKENS - 1)
    is_pair = (column >> _SHIFT == level) & (j >> level == gl.where(half & 1 != 0, half - 1, -1))
    # A pair has one level, so each sum is of one number and zeros.
    own = gl.where(is_pair, product, 0.0).reshape([TIMES, _TOKENS, TIMES, _TOKENS])
    sums = gl.expand_dims(gl.expand_dims(gl.sum(gl.sum(own, 2), 0), 0), 2)
    is_there = ((row < _TOKENS) & (column < _TOKENS)).reshape([TIMES, _TOKENS, TIMES, _TOKENS])
    return gl.convert_layout(gl.where(is_there, sums, 0.0).reshape([_GRID, _GRID]), TL, assert_trivial=True)


@gluon.jit
def stacked_levels(q, k, highs, tile, DK: gl.constexpr, TL: gl.constexpr, DL: gl.constexpr):
    """Returns what all pairs of at most 16 tokens give: of keys, and of queries with keys; as `add_levels`."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=TL, k_width=2)
    zeros = gl.zeros([_GRID, _GRID], gl.float32, TL)
    sums = warpgroup_mma_wait(0, deps=[start_stacked_sums(highs, DK, DL)])
    near = gl.convert_layout(gl.exp2(sums).to(gl.float16), LEFT)
    keys = k.load(LEFT) * near
    tile.store(keys)
    fence_async_shared()
    thread_barrier()
    added = warpgroup_mma(keys, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    read = warpgroup_mma(q.load(LEFT) * near, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    added, read = warpgroup_mma_wait(0, deps=[added, read])
    return unstacked(added, TL), unstacked(read, TL)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_rows"])
def solve_few_channels(
    q_desc, k_desc, g_ptr, beta_ptr, inverses_ptr, scores_ptr, reading_ptr, keys_ptr, kept_ptr, remains_ptr,
    cu_blocks_ptr, blocks_ptr, num_rows, norm_eps, stride_g, stride_beta,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DK: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """AT_ONCE: programs that the card holds at once."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    TL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _GRID, 16])
    DL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DK, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, TL)
    COLUMN: gl.constexpr = gl.SliceLayout(0, TL)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [128 // DK, DK // 4], [4, 1], [1, 0])
    PART: gl.constexpr = 32
    DTYPE: gl.constexpr = q_desc.dtype
    # Programs of the first blocks come first: behind the last block there are many that only end.
    block = gl.program_id(1)
    makes_pairs = gl.program_id(0) < HEADS
    head = gl.program_id(0) % HEADS
    full = make_barriers(1, 1)
    allow_next_launch()
    wait_for_last_launch()
    # At once: behind the last block lies any number.
    first = gl.load(blocks_ptr + block * 2)
    count = gl.load(blocks_ptr + block * 2 + 1)
    num_blocks = gl.load(cu_blocks_ptr + num_rows)
    is_split = num_blocks * (_PARTS * HEADS) <= AT_ONCE
    makes_rows = is_split != makes_pairs
    if (block < num_blocks) & (is_split | makes_pairs):
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
        # All loads at once: a sum of one part would wait before the next one's.
        g = load_decays(g_ptr + at, first, count, 0, stride_g, PART, DK, WIDE)
        later = load_decays(g_ptr + at, first, count, PART, stride_g, PART, DK, WIDE)
        i = gl.arange(0, _GRID, ROW)
        j = gl.arange(0, _GRID, COLUMN)
        beta = gl.load(beta_ptr + (first + i).to(gl.int64) * stride_beta + head, mask=i < count, other=0.0)
        total = gl.zeros([DK], gl.float32, gl.SliceLayout(0, WIDE))
        total = store_exponents(highs.slice(0, PART, 0), lows.slice(0, PART, 0), g, total, makes_rows)
        total = store_exponents(highs.slice(PART, PART, 0), lows.slice(PART, PART, 0), later, total, makes_rows)
        if makes_rows:
            remains = remains_ptr + (block.to(gl.int64) * HEADS + head) * DK
            gl.store(remains + gl.arange(0, DK, gl.SliceLayout(0, WIDE)), gl.exp2(total))
        mbarrier.wait(full.index(0), 0)
        q = qs._reinterpret(gl.float16, [_GRID, DK], qs.layout)
        k = ks._reinterpret(gl.float16, [_GRID, DK], ks.layout)
        if count <= _TOKENS:
            norm_few_inputs(qs, ks, diagonal, count, norm_eps, DK)
        else:
            clear_tail(ks, count, DK)
            norm_inputs(qs, ks, diagonal, count, norm_eps, PART, DK)
        fence_async_shared()
        thread_barrier()
        if makes_rows:
            store_decayed(
                kept_ptr + at, keys_ptr + at, reading_ptr + at, q, k, highs, lows, tiles.index(0), first, count,
                HEADS, DK, DL,
            )  # fmt: skip
        if makes_pairs:
            products = gl.zeros([_GRID, _GRID], gl.float32, TL)
            scores = gl.where(i[:, None] == j[None, :], diagonal.load(ROW)[:, None], 0.0)
            if count <= _TOKENS:
                added, read = stacked_levels(q, k, highs, tiles.index(0), DK, TL, DL)
                products += added
                scores += read
            else:
                products, scores = add_levels(products, scores, q, k, highs, tiles, count, DK, TL, DL)
            store_pairs(
                inverses_ptr, scores_ptr, products, scores, beta, highs, tiles, first, count, head, HEADS, DTYPE, TL
            )
        # Used to the end, so that the compiler gives its place to nothing else. Sums of `unstacked` lay over it, and an
        # H200 now and then returned another number for the one pair whose sum lay there (8 blocks, 32 heads).
        mbarrier.invalidate(full.index(0))
