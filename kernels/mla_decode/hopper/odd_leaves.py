"""The odd consumer of mla_decode by leaves: weights of an item's odd tiles, and values 256 .. 511 of all.

What the two hand each other: see the even one.
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
from kernels.mla_decode.hopper.whole import level, moved, weigh
from kernels.softmax.triton import LN_2, NO_KEYS


@gluon.jit
def attend_odd(
    results,
    scale_log2,
    num_tokens,
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
    WANTS_LSE: gl.constexpr,
):
    _, lse_ptr, _, _, _, nodes_ptr, stats_ptr = results
    q_left, q_right, q_rope, left, right, rope = shared[0]
    handed, stats, ends = shared[1]
    q_full, q_empty, left_full, _, right_full, right_empty = bars[0]
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
        last_seen = length - q_len + gl.arange(0, 64, SR) * 0
        if MULTI:
            last_seen += gl.minimum((tile * 64 + gl.arange(0, 64, SR)) // HEADS, q_len - 1)
        mbarrier.wait(q_full, turns & 1)
        per_leaf = leaf_tiles(length, LEAF, SHORT, TILE, True)
        begin = leaf * per_leaf * TILE
        count = (gl.minimum(length - begin, leaves * per_leaf * TILE) + TILE - 1) // TILE
        base = gl.full([64], NO_KEYS, gl.float32, SR)
        acc = gl.zeros([64, 256], gl.float32, VALUES)
        for n in range(leaves):
            for i in range(n * per_leaf, gl.minimum(count, (n + 1) * per_leaf), 2):
                s = step % STAGES
                first = begin + i * TILE
                # What acc has where a leaf begins is kept in memory.
                goes_on = i > n * per_leaf
                if i + 1 < count:
                    t = (step + 1) % STAGES
                    part = start_scores(q, latents, full, t, ((step + 1) // STAGES) & 1, TILE, SCORES)
                    mbarrier.wait(even_done, pairs & 1)
                    others = handed.load(P)
                    new_base = stats.index(0).load(SR)
                    if goes_on:
                        acc = moved(acc, gl.convert_layout(new_base - base, OR))
                    base = new_base
                    values = warpgroup_mma(others, right.index(s), acc, use_acc=goes_on, is_async=True)
                    scores = warpgroup_mma_wait(1, deps=[part])
                    mbarrier.arrive(rope_empty.index(t), count=1)
                    scores = masked(scores, first + TILE, last_seen, q_len, length, TILE, SCORES)
                    half, sums, new_base = weigh(scores, base, scale_log2)
                    handed.store(half)
                    stats.index(1).store(new_base)
                    stats.index(2).store(sums)
                    thread_barrier()
                    mbarrier.arrive(odd_done, count=1)
                    acc = warpgroup_mma_wait(0, deps=[values])
                    mbarrier.arrive(right_empty.index(s), count=1)
                    acc = moved(acc, gl.convert_layout(new_base - base, OR))
                    base = new_base
                    if first + 2 * TILE > length:
                        clear_tail(right.index(t), length - first - TILE, TILE)
                    values = warpgroup_mma(gl.convert_layout(half, P), right.index(t), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[values])
                    mbarrier.arrive(right_empty.index(t), count=1)
                    step += 2
                else:
                    mbarrier.wait(even_done, pairs & 1)
                    others = handed.load(P)
                    new_base = stats.index(0).load(SR)
                    if goes_on:
                        acc = moved(acc, gl.convert_layout(new_base - base, OR))
                    base = new_base
                    thread_barrier()
                    mbarrier.arrive(odd_done, count=1)
                    if first + TILE > length:
                        clear_tail(right.index(s), length - first, TILE)
                    values = warpgroup_mma(others, right.index(s), acc, use_acc=goes_on, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[values])
                    mbarrier.arrive(right_empty.index(s), count=1)
                    step += 1
                pairs += 1
            acc = end_leaf((nodes_ptr, stats_ptr), acc, base, base, n, leaves, 1)[0]
        mbarrier.arrive(q_empty, count=1)
        live = q_len * HEADS - tile * 64
        mbarrier.wait(end_full, turns & 1)
        top = ends.index(0).load(OR)
        total = ends.index(1).load(OR)
        thread_barrier()
        mbarrier.arrive(end_empty, count=1)
        if WANTS_LSE:
            # Computed here: kept over the loop, it would cost registers.
            row = opaque(gl.arange(0, 64, OR))
            token = gl.minimum((tile * 64 + row) // HEADS, q_len - 1)
            lse_at = ((tile * 64 + row) % HEADS).to(gl.int64) * num_tokens + q_start + token
            gl.store(lse_ptr + lse_at, level(top, total) * LN_2, mask=(row < live) & (slot < 0))
        at = (q_start * HEADS + tile * 64).to(gl.int64)
        store_values(results, acc, total, at, slot, live, 256, SLOT_ROWS)
        turns = (turns + 1) & 3
        q_start, q_len, tile, leaf, leaves, length, slot = take(work[0], work[1], work[2], turns)
