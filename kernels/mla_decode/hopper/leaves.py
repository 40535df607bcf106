"""What the partitions of mla_decode for Hopper share: items of the plan, cleared tails, sums over leaves."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.registers import opaque


@gluon.jit
def planned_item(items_ptr, index):
    """An item of the plan; all but the sequence go to the consumers, in this order."""
    at = items_ptr + index * 8
    seq, q_start, q_len, tile = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    return seq, q_start, q_len, tile, gl.load(at + 4), gl.load(at + 5), gl.load(at + 6), gl.load(at + 7)


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
def part_at(row, dim, ROWS: gl.constexpr):
    """Returns the offsets of a partial result: eight values of a row, then eight of the next: stores coalesce."""
    row = opaque(row).to(gl.int64)
    return (row * 8)[:, None] + (dim // 8 * (ROWS * 8) + dim % 8).to(gl.int64)[None, :]


@gluon.jit
def fold(sum_ptr, at, acc, keep, weight, mask):
    """Returns the sum of the leaves so far, in memory, plus this leaf's part."""
    row_sum = gl.load(sum_ptr + at, mask=mask, other=0.0)
    return gl.fma(row_sum, keep + gl.zeros_like(row_sum), acc * weight)


@gluon.jit
def scaled(x, factor):
    """Returns the rounded product: inline PTX, so that ptxas makes no FMA of it. fold.py rounds identically."""
    return gl.inline_asm_elementwise("mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [x, factor], gl.float32, True, 1)


@gluon.jit
def plus(x, y):
    """Returns the sum with the rounding and flush to zero of red.add.f32."""
    return gl.inline_asm_elementwise("add.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, True, 1)


@gluon.jit
def has_moved(keep):
    """Returns whether any row's reference maximum changed; every warp reads all of them."""
    return gl.min(keep.load(gl.BlockedLayout([2], [32], [4], [0])), 0) < 1.0


@gluon.jit
def rescale(sum_ptr, keep, FIRST: gl.constexpr):
    """Rescales the sum in memory to a new reference, sixteen columns at a time; a thread rescales what it adds to."""
    SOME: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    row = gl.arange(0, 64, gl.SliceLayout(1, SOME))
    dim = gl.arange(0, 16, gl.SliceLayout(0, SOME))
    factor = gl.convert_layout(keep, gl.SliceLayout(1, SOME))[:, None]
    begin = opaque(gl.program_id(0) * 0 + FIRST)
    for first in range(begin, begin + 256, 16):
        to = sum_ptr + part_at(row, first + dim, 64)
        gl.store(to, scaled(gl.load(to, cache_modifier=".cg"), factor + gl.zeros([64, 16], gl.float32, SOME)))


@gluon.jit
def join(sum_ptr, acc, n, leaves, factors, moved, row, dim, live, FIRST: gl.constexpr):
    """Adds a leaf to the sum in memory by reductions; returns what the sum becomes, which only the last leaf reads.

    So the sum keeps its first leaf's maximum as reference. Where a leaf rises so far above it that values might
    overflow, the reference changes and the sum in memory is rescaled, row by row.
    """
    keep, weight = factors
    if leaves > 1:
        sums = sum_ptr + part_at(row, dim, 64)
        if n == 0:
            gl.store(sums, acc, mask=live)
        else:
            if moved:
                rescale(sum_ptr, keep, FIRST)
            acc = scaled(acc, weight[:, None] + gl.zeros_like(acc))
            if n < leaves - 1:
                gl.atomic_add(sums, acc, mask=live, sem="relaxed")
            else:
                acc = plus(gl.load(sums, mask=live, other=0.0, cache_modifier=".cg"), acc)
    return acc
