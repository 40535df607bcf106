"""What mla_decode's warps for Hopper share: an item of the plan, the end of a sequence, how leaves join.

Knows no order of work.
"""

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
    """Zeroes the rows past a sequence's last latent: nobody wrote them, and 0 * NaN is not 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    pairs = values._reinterpret(gl.int32, [TILE, values.shape[1] // 2], PAIRS)
    for first in gl.static_range(0, TILE, 16):
        # A branch of its own, so that the compiler does not load all parts before it stores the first; and row numbers
        # that it does not keep from the kernel's start.
        if first + 16 > live:
            part = pairs.slice(first, 16, 0)
            row = first + opaque(gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)))
            part.store(gl.where((row < live)[:, None], part.load(LAYOUT), 0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def part_at(row, dim, ROWS: gl.constexpr):
    """Where a number of a partial result lies: eight of a row, then the next row's, so that a warp's stores touch."""
    row = opaque(row).to(gl.int64)
    return (row * 8)[:, None] + (dim // 8 * (ROWS * 8) + dim % 8).to(gl.int64)[None, :]


@gluon.jit
def fold(sum_ptr, at, acc, keep, weight, mask):
    """The running total of the leaves so far, and this leaf's part in it."""
    total = gl.load(sum_ptr + at, mask=mask, other=0.0)
    return gl.fma(total, keep + gl.zeros_like(total), acc * weight)


@gluon.jit
def scaled(x, factor):
    """A product that no sum swallows: everybody who folds leaves rounds here, and again where he adds."""
    return gl.inline_asm_elementwise("mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [x, factor], gl.float32, True, 1)


@gluon.jit
def plus(x, y):
    """A sum as memory makes it."""
    return gl.inline_asm_elementwise("add.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, True, 1)


@gluon.jit
def has_moved(keep):
    """Whether a row's reference has: read by every warp for itself."""
    return gl.min(keep.load(gl.BlockedLayout([2], [32], [4], [0])), 0) < 1.0


@gluon.jit
def rescale(sum_ptr, keep, FIRST: gl.constexpr):
    """The total in memory under a new reference, sixteen columns at a time; each thread what it will add to."""
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
    """A leaf joins the total in memory, which is added to where it lies: nothing is read before the last one.

    So the total keeps a reference, its first leaf's peak; where a leaf rises so far above it that its numbers might
    overflow, the reference moves, and what lies in memory is multiplied. Rows decide on that one by one.
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
