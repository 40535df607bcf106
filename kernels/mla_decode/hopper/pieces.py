"""What mla_decode's warps for Hopper share: an item of the plan, the end of a sequence, the fold of two leaves.

Knows no order of work.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kernels.mailbox.kernel import thread_barrier


@gluon.jit
def planned_item(plan, index, HEADS: gl.constexpr, LEAF: gl.constexpr, MULTI: gl.constexpr):
    """(sequence, first query, queries, tile of rows, first leaf, leaves, keys, slot) of a planned item.

    All but the sequence go to the consumers, in this order.
    """
    items_ptr, _, lengths_ptr, cu_q_ptr, _ = plan
    at = items_ptr + index * 5
    seq = gl.load(at)
    if MULTI:
        q_start = gl.load(cu_q_ptr + seq)
        q_len = gl.load(cu_q_ptr + seq + 1) - q_start
    else:
        q_start = seq
        q_len = 1
    length = gl.load(lengths_ptr + seq)
    return seq, q_start, q_len, gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), length, gl.load(at + 4)


@gluon.jit
def clear_tail(values, live, TILE: gl.constexpr):
    """Zeroes the rows past a sequence's last latent: nobody wrote them, and 0 * NaN is not 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    for first in gl.static_range(0, TILE, 16):
        part = values.slice(first, 16, 0)
        row = first + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        part.store(gl.where((row < live)[:, None], part.load(LAYOUT), 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def afresh(x):
    """The same numbers, made here as far as the compiler knows: what follows from them costs no registers before."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def part_at(row, dim, ROWS: gl.constexpr):
    """Where a number of a partial result lies: eight of a row, then the next row's, so that a warp's stores touch."""
    row = afresh(row).to(gl.int64)
    return (row * 8)[:, None] + (dim // 8 * (ROWS * 8) + dim % 8).to(gl.int64)[None, :]


@gluon.jit
def fold(sum_ptr, at, acc, keep, weight, mask):
    """The running total of the leaves so far, and this leaf's part in it."""
    total = gl.load(sum_ptr + at, mask=mask, other=0.0)
    return gl.fma(total, keep + gl.zeros_like(total), acc * weight)
