"""The even consumer of mla_decode by leaves: weights of an item's even tiles, and values 0 .. 255 of all.

    even   scores 0 | weights 0 | values 0    | values 1 | scores 2 | weights 2 | ...
    odd    scores 1 |             values 0, weights 1    | values 1 | scores 3 | ...

So that one consumer's products run while the other makes weights. Weights go back and forth in one buffer, with the
rows' bases: the odd consumer reads an even tile's before it writes an odd one's, and so on. Where a leaf ends, its sums
are kept in memory, or added to what is kept there: see nodes.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.registers import opaque
from kernels.hopper.work_queue import take
from kernels.mla_decode.hopper.leaves import clear_tail, leaf_tiles
from kernels.mla_decode.hopper.nodes import end_leaf, store_values
from kernels.mla_decode.hopper.scores import masked, start_scores
from kernels.mla_decode.hopper.whole import moved, weigh
from kernels.softmax.triton import NO_KEYS


@gluon.jit
def attend_even(
    results,
    scale_log2,
    shared,
    bars,
    work,
    HEADS: gl.constexpr,
    LEAF: gl.constexpr,
    SHORT: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTI: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
):
    _, _, _, row_max_ptr, row_sum_ptr, nodes_ptr, stats_ptr = results
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
    q_start, q_len, tile, leaf, leaves, length, slot = take(work[0], work[1], work[2], turns)
    while leaves >= 0:
        if not MULTI:
            q_len = 1
        row = gl.arange(0, 64, SR)
        last_seen = length - q_len + row * 0
        if MULTI:
            last_seen += gl.minimum((tile * 64 + row) // HEADS, q_len - 1)
        mbarrier.wait(q_full, turns & 1)
        per_leaf = leaf_tiles(length, LEAF, SHORT, TILE, True)
        begin = leaf * per_leaf * TILE
        count = (gl.minimum(length - begin, leaves * per_leaf * TILE) + TILE - 1) // TILE
        # Above every masked score, so that the weight of one is 0 even in a row that has seen no key yet.
        base = gl.full([64], NO_KEYS, gl.float32, SR)
        row_sum = gl.full([64], 0.0, gl.float32, SR)
        acc = gl.zeros([64, 256], gl.float32, VALUES)
        for n in range(leaves):
            for number in range(n * per_leaf, gl.minimum(count, (n + 1) * per_leaf)):
                s = step % STAGES
                first = begin + number * TILE
                if number % 2 == 0:
                    part = start_scores(q, latents, full, s, (step // STAGES) & 1, TILE, SCORES)
                    scores = warpgroup_mma_wait(0, deps=[part])
                    mbarrier.arrive(rope_empty.index(s), count=1)
                    scores = masked(scores, first, last_seen, q_len, length, TILE, SCORES)
                    half, tile_sum, new_base = weigh(scores, base, scale_log2)
                    handed.store(half)
                    stats.index(0).store(new_base)
                    thread_barrier()
                    mbarrier.arrive(even_done, count=1)
                    weights = gl.convert_layout(half, P)
                else:
                    mbarrier.wait(odd_done, pairs & 1)
                    pairs += 1
                    weights = handed.load(P)
                    new_base = stats.index(1).load(SR)
                    tile_sum = stats.index(2).load(SR)
                by = new_base - base
                row_sum = gl.fma(row_sum, gl.exp2(-by), tile_sum)
                base = new_base
                # What acc has where a leaf begins is kept in memory.
                goes_on = number > n * per_leaf
                if goes_on:
                    acc = moved(acc, gl.convert_layout(by, OR))
                if first + TILE > length:
                    clear_tail(left.index(s), length - first, TILE)
                values = warpgroup_mma(weights, left.index(s), acc, use_acc=goes_on, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[values])
                mbarrier.arrive(left_empty.index(s), count=1)
                step += 1
            acc, row_sum = end_leaf((nodes_ptr, stats_ptr), acc, row_sum, base, n, leaves, 0)
        if count % 2 > 0:
            # There is no odd tile, but it says that the last weights were read.
            mbarrier.wait(odd_done, pairs & 1)
            pairs += 1
        mbarrier.arrive(q_empty, count=1)
        mbarrier.wait(end_empty, (turns & 1) ^ 1)
        ends.index(0).store(base)
        ends.index(1).store(row_sum)
        thread_barrier()
        mbarrier.arrive(end_full, count=1)
        # Computed here once more: kept over the loop, they would cost registers.
        row = opaque(gl.arange(0, 64, SR))
        live = q_len * HEADS - tile * 64
        if slot >= 0:
            gl.store(row_max_ptr + slot.to(gl.int64) * SLOT_ROWS + row, base, mask=row < live)
            gl.store(row_sum_ptr + slot.to(gl.int64) * SLOT_ROWS + row, row_sum, mask=row < live)
        at = (q_start * HEADS + tile * 64).to(gl.int64)
        store_values(results, acc, gl.convert_layout(row_sum, OR), at, slot, live, 0, SLOT_ROWS)
        turns = (turns + 1) & 3
        q_start, q_len, tile, leaf, leaves, length, slot = take(work[0], work[1], work[2], turns)
