"""What the partitions of mla_decode for Hopper share: items of the plan, cleared tails, sums over leaves."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.registers import opaque
from kernels.hopper.softmax import any_in_warp


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
def rebase(sum_ptr, by, FIRST: gl.constexpr):
    """Makes sums in memory relative to bases that are `by` higher; most warps' are the same.

    Sixteen columns at a time; a thread rescales what it adds to.
    """
    SOME: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    if any_in_warp(by, 0.0):
        row = gl.arange(0, 64, gl.SliceLayout(1, SOME))
        dim = gl.arange(0, 16, gl.SliceLayout(0, SOME))
        factor = gl.convert_layout(gl.exp2(-by), gl.SliceLayout(1, SOME), assert_trivial=True)[:, None]
        begin = opaque(gl.program_id(0) * 0 + FIRST)
        for first in range(begin, begin + 256, 16):
            to = sum_ptr + part_at(row, first + dim, 64)
            gl.store(to, scaled(gl.load(to, cache_modifier=".cg"), factor + gl.zeros([64, 16], gl.float32, SOME)))


@gluon.jit
def own_sums(sum_ptr):
    """Returns where a program's sums are: of all its item's leaves, and of a group."""
    return sum_ptr + opaque(gl.program_id(0)) * (2 * 64 * 512)


@gluon.jit
def _sums_at(sum_ptr, acc, FIRST: gl.constexpr):
    """Returns where sums lie in memory. Addresses are computed here: kept over a loop, they would cost registers."""
    LAYOUT: gl.constexpr = acc.type.layout
    row = opaque(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)))
    dim = FIRST + gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))
    return sum_ptr + part_at(row, dim, 64)


@gluon.jit
def _with_sums(sum_ptr, acc, by, FIRST: gl.constexpr):
    """Returns sums in memory plus those given, whose bases are `by` higher."""
    rebase(sum_ptr, by, FIRST)
    return plus(gl.load(_sums_at(sum_ptr, acc, FIRST), cache_modifier=".cg"), acc)


@gluon.jit
def join_leaf(sum_ptr, acc, n, base, bases, GROUP: gl.constexpr, FIRST: gl.constexpr):
    """Adds the n-th leaf of an item, not its last, to sums in memory; returns the bases that these then have.

    Leaves of the first group are added to the total, one by one, those of a later group to a sum of their own; what a
    later group's last one brings is the whole group, for the total. Reductions add, which nobody waits for.
    """
    total_base, group_base = bases
    by = base - total_base
    is_first = n == 1
    to_ptr = sum_ptr
    if (n > GROUP) & (n % GROUP > 0):
        by = base - group_base
        is_first = n % GROUP == 1
        to_ptr = sum_ptr + 64 * 512
        group_base = base
    else:
        total_base = base
    to = _sums_at(to_ptr, acc, FIRST)
    if is_first:
        gl.store(to, acc)
    else:
        rebase(to_ptr, by, FIRST)
        gl.atomic_add(to, acc, sem="relaxed")
    return total_base, group_base


@gluon.jit
def join_sums(n, row_sum, sums, base, bases, is_last, GROUP: gl.constexpr):
    """Returns sums of weights, of all and of the group, with those of the n-th leaf, in the order of `join_leaf`."""
    all_sum, group_sum = sums
    group_sum = gl.fma(group_sum, gl.exp2(bases[1] - base), row_sum)
    if (n <= GROUP) | (n % GROUP == 1):
        group_sum = row_sum
    if (n <= GROUP) | (n % GROUP == 0) | is_last:
        all_sum = gl.fma(all_sum, gl.exp2(bases[0] - base), group_sum)
    return all_sum, group_sum


@gluon.jit
def joined(sum_ptr, acc, n, leaves, base, bases, GROUP: gl.constexpr, FIRST: gl.constexpr):
    """Returns what a group's last leaf, an item's n-th, becomes: with the sum of a later group, if there is one, and of
    the last group with the total."""
    total_base, group_base = bases
    first = 1
    if (n > GROUP) & (n % GROUP != 1):
        first = 0
    last = 1
    if (n == leaves) & (n > 1):
        last = 2
    for i in range(first, last):
        by = base - total_base
        if i == 0:
            by = base - group_base
        acc = _with_sums(sum_ptr + (1 - i) * (64 * 512), acc, by, FIRST)
    return acc


@gluon.jit
def store_values(results, acc, row_sum, at, slot, live, FIRST: gl.constexpr, SLOT_ROWS: gl.constexpr):
    """Stores 256 columns of an item's rows: as a part at its slot, or as outputs from row `at` on."""
    out_ptr, _, acc_ptr, _, _, _ = results
    LAYOUT: gl.constexpr = acc.type.layout
    row = opaque(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)))
    dim = FIRST + gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))
    mask = (row < live)[:, None]
    if slot >= 0:
        gl.store(acc_ptr + slot.to(gl.int64) * (SLOT_ROWS * 512) + part_at(row, dim, SLOT_ROWS), acc, mask=mask)
    else:
        result = (acc * (1.0 / gl.where(row_sum == 0.0, 1.0, row_sum))[:, None]).to(gl.bfloat16)
        gl.store(out_ptr + (at + row)[:, None] * 512 + dim[None, :], result, mask=mask)
