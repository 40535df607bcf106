"""Softmax states of a segment's keys: where they wait in memory, and how two become one.

A state is (base, sum, acc) of 64 rows: what scaled scores are relative to (`kernels.hopper.softmax`), the sum of
2^(score - base), the values weighted so. A row that saw no key of a segment has the base NO_KEYS * scale and zeros:
adding it changes nothing.

    slot    of memory, one state: two of each program, for the totals of a tile that is computed whole, then two of each
            unit, one for each consumer
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.registers import opaque_zero
from kernels.hopper.work_queue import read_number


@gluon.jit
def own_program():
    """Returns the program's number, read where it is used: read once for all partitions, it would spill."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def num_programs():
    """Returns the number of programs of the launch, read where it is used."""
    return gl.inline_asm_elementwise("mov.u32 $0, %nctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fold(base, row_sum, acc, other_base, other_sum, other_acc, RO: gl.constexpr):
    """Returns the softmax state over the keys of both states; the first state is of the earlier keys."""
    top = gl.maximum(base, other_base)
    keep = gl.exp2(base - top)
    weight = gl.exp2(other_base - top)
    wide = gl.zeros_like(acc)
    scaled = other_acc * (wide + gl.expand_dims(gl.convert_layout(weight, RO), 1))
    acc = gl.fma(acc, wide + gl.expand_dims(gl.convert_layout(keep, RO), 1), scaled)
    return top, gl.fma(row_sum, keep, other_sum * weight), acc


@gluon.jit
def _by_thread(D: gl.constexpr):
    """Returns the offsets of an acc in its slot, [D / 8, 128 threads, 4]: 16 bytes of each thread in turn."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([D // 8, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])
    group = gl.arange(0, D // 8, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    thread = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))) + opaque_zero()
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return (group * 512)[:, None, None] + (thread * 4)[None, :, None] + number[None, None, :]


@gluon.jit
def store_state(states, slot, row, base, row_sum, acc, D: gl.constexpr):
    """Stores 64 rows, acc in the order in which threads hold it; other threads may load it after the barrier."""
    acc_ptr, base_ptr, sum_ptr = states
    LAYOUT: gl.constexpr = gl.BlockedLayout([D // 8, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])
    # Of a row: warp, one of two, lane / 4; of a column: group of eight, lane % 4, one of two.
    held = acc.reshape([4, 2, 8, D // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([D // 8, 128, 4])
    held = gl.convert_layout(held, LAYOUT, assert_trivial=True)
    gl.store(acc_ptr + slot.to(gl.int64) * (64 * D) + _by_thread(D), held)
    gl.store(base_ptr + slot * 64 + row, base)
    gl.store(sum_ptr + slot * 64 + row, row_sum)
    thread_barrier()


@gluon.jit
def load_state(states, slot, row, D: gl.constexpr, OL: gl.constexpr):
    """Returns (base, row_sum, acc) of a slot, read from L2: another program may have written it."""
    acc_ptr, base_ptr, sum_ptr = states
    held = gl.load(acc_ptr + slot.to(gl.int64) * (64 * D) + _by_thread(D), cache_modifier=".cg")
    acc = held.reshape([D // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, D])
    base = gl.load(base_ptr + slot * 64 + row, cache_modifier=".cg")
    row_sum = gl.load(sum_ptr + slot * 64 + row, cache_modifier=".cg")
    return base, row_sum, gl.convert_layout(acc, OL, assert_trivial=True)


@gluon.jit
def add_to(states, slot, row, base, row_sum, acc, D: gl.constexpr, OL: gl.constexpr, RO: gl.constexpr):
    """Returns the state of a slot folded with the given state, which is of later keys."""
    total = load_state(states, slot, row, D, OL)
    return fold(total[0], total[1], total[2], base, row_sum, acc, RO)


@gluon.jit
def hand_over(
    states, arrivals_ptr, queue, late, head, segments, segment, base, row_sum, acc,
    PART: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, OL: gl.constexpr, RS: gl.constexpr, RO: gl.constexpr,
):  # fmt: skip
    """Stores the state of one segment of a tile. Returns (is_last, base, row_sum, acc).

    The program that stores the last missing segment of a tile folds all segments in ascending order, gets the folded
    state, and resets the count of arrivals to 0. For the other programs the state means nothing.
    """
    at = 2 * (num_programs() + read_number(queue, late + 6, 4) * HEADS + head * segments) + PART
    arrivals = arrivals_ptr + (read_number(queue, late + 7, 4) * HEADS + head) * 2 + PART
    row = gl.arange(0, 64, RS) + opaque_zero()
    store_state(states, at + 2 * segment, row, base, row_sum, acc, D)
    last = gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == segments - 1
    if last:
        gl.store(arrivals, 0)
        base, row_sum, acc = load_state(states, at, row, D, OL)
        for number in range(1, segments):
            other = load_state(states, at + 2 * number, row, D, OL)
            base, row_sum, acc = fold(base, row_sum, acc, other[0], other[1], other[2], RO)
    return last, base, row_sum, acc
