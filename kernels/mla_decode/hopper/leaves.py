"""What the partitions of mla_decode for Hopper share: items of the plan, cleared tails, running totals."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.registers import opaque
from kernels.mla_decode import tree_sizes

SHORT_LEAVES = gl.constexpr(tree_sizes.SHORT_LEAVES)


@gluon.jit
def planned_item(items_ptr, index):
    """Returns an item of the plan; all but the sequence go to the consumers, in this order."""
    at = items_ptr + index * 8
    seq, q_start, q_len, tile = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    return seq, q_start, q_len, tile, gl.load(at + 4), gl.load(at + 5), gl.load(at + 6), gl.load(at + 7)


@gluon.jit
def leaf_tiles(length, LEAF: gl.constexpr, SHORT: gl.constexpr, TILE: gl.constexpr, EVEN: gl.constexpr):
    """Returns how many tiles of latents a leaf of a sequence has: see Tree. 0 if it has no latents."""
    if SHORT == 0:
        return length * 0 + LEAF // TILE
    size = (length + TILE - 1) // TILE
    most = gl.where(size <= SHORT_LEAVES * (SHORT // TILE), SHORT // TILE, LEAF // TILE)
    # Leaves are 1 << shift, or half as many with EVEN, where two consumers take tiles by turns.
    shift = 1 if EVEN else 0
    while (most << shift) < (2 * size if EVEN else size):
        shift += 1
    return ((size + (1 << shift) - 1) >> shift) * (2 if EVEN else 1)


@gluon.jit
def clear_tail(values, live, TILE: gl.constexpr):
    """Clears the rows past a sequence's last latent, which may hold anything: 0 * NaN is not 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    # Columns lie in blocks of 128 bytes a row. A loop: a launch takes longer with more code, see ADR 18.
    BLOCKS: gl.constexpr = values.shape[1] // 64
    blocks = values._reinterpret(gl.int32, [BLOCKS, TILE, 32], PAIRS)
    for i in range(opaque(BLOCKS)):
        block = blocks.index(i)
        for first in gl.static_range(0, TILE, 16):
            # A branch keeps the compiler from loading all parts before it stores the first; opaque row numbers are not
            # kept in registers from the kernel's start.
            if first + 16 > live:
                part = block.slice(first, 16, 0)
                row = first + opaque(gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)))
                part.store(gl.where((row < live)[:, None], part.load(LAYOUT), 0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def fold(sum_ptr, at, acc, keep, weight, mask):
    """Returns the sum of the leaves so far, in memory, plus this leaf's part."""
    row_sum = gl.load(sum_ptr + at, mask=mask, other=0.0)
    return gl.fma(row_sum, keep + gl.zeros_like(row_sum), acc * weight)
