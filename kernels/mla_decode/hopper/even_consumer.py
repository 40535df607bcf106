"""The even consumer of mla_decode cut by load: scores of an item's even tiles, and values 0 .. 255 of all.

    even   scores 0 | softmax 0 | values 0    | values 1 | scores 2 | softmax 2 | ...
    odd    scores 1 |             values 0, softmax 1    | values 1 | scores 3 | ...

So that one consumer's products run while the other is at its softmax. Weights go back and forth in one buffer, with the
rows' maxima: the odd consumer reads an even tile's before it writes an odd one's, and so on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.registers import opaque
from kernels.hopper.work_queue import take
from kernels.mla_decode.hopper.fold_together import fold_together
from kernels.mla_decode.hopper.leaves import clear_tail
from kernels.mla_decode.hopper.parts import level, store_rows
from kernels.mla_decode.hopper.scores import masked, start_scores, weighed
from kernels.mla_decode.hopper.whole import moved
from kernels.softmax.triton import NO_KEYS


@gluon.jit
def rebased(row_sum, acc, by, tile_sum):
    """Returns a row's sums relative to a base that is `by` higher: of weights, with a tile's, and of values."""
    OR: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return gl.fma(row_sum, gl.exp2(-by), tile_sum), moved(acc, gl.convert_layout(by, OR))


@gluon.jit
def attend_even(
    results,
    together,
    scale_log2,
    shared,
    bars,
    work,
    HEADS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTI: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    _, _, _, levels_ptr = results
    q_left, q_right, q_rope, left, right, rope = shared[0]
    handed, stats, ends = shared[1]
    q_full, q_empty, left_full, left_empty, right_full, _ = bars[0]
    rope_full, rope_empty = bars[1]
    even_done, odd_done, end_full, end_empty = bars[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=VALUES, k_width=2)
    SR: gl.constexpr = gl.SliceLayout(1, SCORES)
    OR: gl.constexpr = gl.SliceLayout(1, VALUES)
    q = (q_left, q_right, q_rope)
    latents = (left, right, rope)
    full = (left_full, right_full, rope_full)
    step = 0
    pairs = 0
    turns = 0
    q_start, q_len, tile, begin, stop, length, slot = take(work[0], work[1], work[2], turns)
    while stop >= 0:
        if not MULTI:
            q_len = 1
        row = gl.arange(0, 64, SR)
        last_seen = length - q_len + row * 0
        if MULTI:
            last_seen += gl.minimum((tile * 64 + row) // HEADS, q_len - 1)
        mbarrier.wait(q_full, turns & 1)
        count = (stop - begin + TILE - 1) // TILE
        # Above every masked score, so that the weight of one is 0 even in a row that has seen no key yet.
        base = gl.full([64], NO_KEYS, gl.float32, SR)
        row_sum = gl.full([64], 0.0, gl.float32, SR)
        acc = gl.zeros([64, 256], gl.float32, VALUES)
        for i in range(0, count, 2):
            s = step % STAGES
            first = begin + i * TILE
            part = start_scores(q, latents, full, s, (step // STAGES) & 1, TILE, SCORES)
            scores = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(rope_empty.index(s), count=1)
            scores = masked(scores, first, last_seen, q_len, length, TILE, SCORES)
            half, tile_sum, new_base = weighed(scores, base, scale_log2)
            handed.store(half)
            stats.index(0).store(new_base)
            thread_barrier()
            mbarrier.arrive(even_done, count=1)
            row_sum, acc = rebased(row_sum, acc, new_base - base, tile_sum)
            base = new_base
            if first + TILE > length:
                clear_tail(left.index(s), length - first, TILE)
            values = warpgroup_mma(gl.convert_layout(half, P), left.index(s), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[values])
            mbarrier.arrive(left_empty.index(s), count=1)
            step += 1
            # Where there is no odd tile it says that this one's weights were read.
            mbarrier.wait(odd_done, pairs & 1)
            pairs += 1
            if i + 1 < count:
                s = step % STAGES
                others = handed.load(P)
                new_base = stats.index(1).load(SR)
                row_sum, acc = rebased(row_sum, acc, new_base - base, stats.index(2).load(SR))
                base = new_base
                if first + 2 * TILE > length:
                    clear_tail(left.index(s), length - first - TILE, TILE)
                values = warpgroup_mma(others, left.index(s), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[values])
                mbarrier.arrive(left_empty.index(s), count=1)
                step += 1
        mbarrier.arrive(q_empty, count=1)
        mbarrier.wait(end_empty, (turns & 1) ^ 1)
        ends.index(0).store(base)
        ends.index(1).store(row_sum)
        thread_barrier()
        mbarrier.arrive(end_full, count=1)
        if slot >= 0:
            # Computed here once more: kept over the loop, they would cost registers.
            row = opaque(gl.arange(0, 64, SR))
            live = row < q_len * HEADS - tile * 64
            gl.store(levels_ptr + slot * SLOT_ROWS + row, level(base, row_sum), mask=live)
        row_sum = gl.convert_layout(row_sum, OR)
        store_rows(results, acc, row_sum, (q_start, q_len, tile, slot), 0, HEADS, SLOT_ROWS, VALUES)
        turns = (turns + 1) & 3
        q_start, q_len, tile, begin, stop, length, slot = take(work[0], work[1], work[2], turns)
    if TOGETHER:
        fold_together(results, together, 0, 0, HEADS, SLOT_ROWS, False, False)
