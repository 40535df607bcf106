"""Folds the parts of a unit within the attention that is cut by load, up a binary tree over the parts.

    parts     0   1   2   3   4        a sum of neighbours is a node; who comes first to one leaves its sum in memory
    nodes       0       2     |        and is done, who comes second adds the two and goes on to the next node
                    1         |
                          3

A node's sum has the same bits whoever comes first, so a result's depend on the cuts alone. Each consumer folds its own
columns and has counters and sums of softmax of its own; counters return to 0, so that a captured graph can replay.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.barriers import thread_barrier
from kernels.mla_decode.hopper.leaves import part_at, parts_of, plus, scaled


@gluon.jit
def halves(x):
    """Returns the left and the right columns of x; a thread keeps what it has."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def joined(left, right):
    """Returns what `halves` took apart."""
    return gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def with_other(x, acc_ptr, row, first, live, keep, weight, SLOT_ROWS: gl.constexpr):
    """Returns keep * x + weight * other, of 64 columns from `first` on: registers hold no more of the other sum."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    dim = first + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    where = acc_ptr + part_at(gl.convert_layout(row, ROW), dim, SLOT_ROWS)
    # Past the first cache: another program has written it.
    other = gl.load(where, mask=gl.convert_layout(live, ROW)[:, None], other=0.0, cache_modifier=".cg")
    own = gl.convert_layout(x, LAYOUT, assert_trivial=True)
    zero = gl.zeros_like(own)
    own = scaled(own, zero + gl.convert_layout(keep, ROW)[:, None])
    other = scaled(other, zero + gl.convert_layout(weight, ROW)[:, None])
    # No FMA: it would round one of the two products and not the other, so that who comes first would matter.
    return gl.convert_layout(plus(own, other), x.type.layout, assert_trivial=True)


@gluon.jit
def fold_inside(
    state,
    parts_ptrs,
    counters_ptr,
    place,
    row,
    dim,
    live,
    HALF: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
):
    """Returns (whether this program has the unit's sum, the state: maxima and sums [64] of rows, acc [64, 256]).

    `place` is the part's in the plan. HALF 0 has columns 0 .. 255, HALF 1 the others. The next two arrivals of a
    counter are those of who comes first, before and after it writes; the third is of who comes second.
    """
    row_max, row_sum, acc = state
    acc_ptr, row_max_ptr, row_sum_ptr = parts_ptrs
    first_slot, parts, index = parts_of(place)
    span = index * 0 + 1
    has_sum = index * 0 + 1
    goes_on = span < parts
    while goes_on:
        begin = index // (2 * span) * (2 * span)
        if begin + span < parts:
            node = first_slot + begin + span - 1
            counter = counters_ptr + 2 * node + HALF
            slot = node.to(gl.int64)
            stats = (2 * slot + HALF) * SLOT_ROWS + row
            arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == 0:
                gl.store(acc_ptr + slot * (SLOT_ROWS * 512) + part_at(row, dim, SLOT_ROWS), acc, mask=live[:, None])
                gl.store(row_max_ptr + stats, row_max, mask=live)
                gl.store(row_sum_ptr + stats, row_sum, mask=live)
                thread_barrier()
                gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                has_sum = index * 0
            else:
                # Who comes first writes while it holds a multiprocessor, so this ends.
                seen = arrived + 1
                while seen < 3:
                    seen = gl.atomic_add(counter, 0, sem="acq_rel", scope="gpu")
                thread_barrier()
                other_max = gl.load(row_max_ptr + stats, mask=live, other=0.0, cache_modifier=".cg")
                other_sum = gl.load(row_sum_ptr + stats, mask=live, other=0.0, cache_modifier=".cg")
                top = gl.maximum(row_max, other_max)
                keep = gl.exp2(row_max - top)
                weight = gl.exp2(other_max - top)
                row_max = top
                row_sum = plus(scaled(row_sum, keep), scaled(other_sum, weight))
                other_ptr = acc_ptr + slot * (SLOT_ROWS * 512)
                left, right = halves(acc)
                a, b = halves(left)
                c, d = halves(right)
                a = with_other(a, other_ptr, row, 256 * HALF, live, keep, weight, SLOT_ROWS)
                b = with_other(b, other_ptr, row, 256 * HALF + 64, live, keep, weight, SLOT_ROWS)
                c = with_other(c, other_ptr, row, 256 * HALF + 128, live, keep, weight, SLOT_ROWS)
                d = with_other(d, other_ptr, row, 256 * HALF + 192, live, keep, weight, SLOT_ROWS)
                acc = gl.convert_layout(joined(joined(a, b), joined(c, d)), acc.type.layout, assert_trivial=True)
                gl.store(counter, 0)
        span = span * 2
        goes_on = (has_sum > 0) & (span < parts)
    return has_sum, row_max, row_sum, acc
