"""What mla_decode's warps for Hopper share: an item of the plan, the end of a sequence, the fold of two leaves.

Knows no order of work.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

# Gluon's name of the barrier among a partition's threads, in 3.6 and after it.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def planned_item(plan, index, HEADS: gl.constexpr, LEAF: gl.constexpr, MULTI: gl.constexpr):
    """(sequence, first query, queries, tile of rows, first leaf, leaves, keys, slot) of a planned item."""
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
def publish(mail, full, empty, turn, item):
    """Hands an item to the consumers: first query, queries, tile of rows, first leaf, leaves, keys, slot."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = turn % 2 * 8
    mbarrier.wait(empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
    for i in gl.static_range(7):
        mail.index(slot + i).store(gl.full([1], 0, gl.int32, ONE) + item[i])
    thread_barrier()
    mbarrier.arrive(full.index(turn % 2), count=1)


@gluon.jit
def take(mail, full, empty, turn):
    """The next item, as the producer found it: what a consumer would otherwise wait for memory to learn."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = turn % 2 * 8
    mbarrier.wait(full.index(turn % 2), (turn // 2) & 1)
    q_start = gl.max(mail.index(slot + 0).load(ONE), 0)
    q_len = gl.max(mail.index(slot + 1).load(ONE), 0)
    tile = gl.max(mail.index(slot + 2).load(ONE), 0)
    leaf = gl.max(mail.index(slot + 3).load(ONE), 0)
    leaves = gl.max(mail.index(slot + 4).load(ONE), 0)
    length = gl.max(mail.index(slot + 5).load(ONE), 0)
    part = gl.max(mail.index(slot + 6).load(ONE), 0)
    thread_barrier()
    mbarrier.arrive(empty.index(turn % 2), count=1)
    return q_start, q_len, tile, leaf, leaves, length, part


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
