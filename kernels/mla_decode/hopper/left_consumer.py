"""The left consumer of mla_decode for Hopper: scores, softmax, and the first 256 dimensions of the values.

It hands the right consumer the weights of each tile, and the factors by which a leaf is added to the sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.registers import opaque
from kernels.hopper.work_queue import take
from kernels.mla_decode.hopper.leaves import clear_tail, has_moved, join, part_at
from kernels.softmax.triton import LN_2, MASKED, NO_KEYS


@gluon.jit
def attend_left(
    results,
    scale_log2,
    shared,
    bars,
    work,
    HEADS: gl.constexpr,
    LEAF: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTI: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    out_ptr, _, acc_ptr, row_max_ptr, row_sum_ptr, sum_ptr = results
    q_left, q_right, q_rope, left, right, rope = shared[0]
    handed, decays, folds = shared[1]
    q_full, q_empty, left_full, left_empty, right_full, _ = bars[0]
    hand_full, hand_empty, fold_full, fold_empty = bars[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=VALUES, k_width=2)
    SR: gl.constexpr = gl.SliceLayout(1, SCORES)
    OR: gl.constexpr = gl.SliceLayout(1, VALUES)
    # A power of two that no fp32 sum is too large to be multiplied by.
    FAR: gl.constexpr = 64.0
    column = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    dim = gl.arange(0, 256, gl.SliceLayout(0, VALUES))
    zeros = gl.zeros([64, TILE], gl.float32, SCORES)
    step = 0
    # One register for two counts: items below, leaves that were added from bit 16 on.
    turns = 0
    q_start, q_len, tile, leaf, leaves, length, slot = take(work[0], work[1], work[2], turns)
    while leaves >= 0:
        if not MULTI:
            q_len = 1
        row = gl.arange(0, 64, SR)
        last_seen = length - q_len
        if MULTI:
            last_seen += gl.minimum((tile * 64 + row) // HEADS, q_len - 1)
        mbarrier.wait(q_full, turns & 1)
        run_max = gl.full([64], NO_KEYS, gl.float32, SR)
        run_sum = gl.full([64], 0.0, gl.float32, SR)
        for n in range(leaves):
            start = (leaf + n) * LEAF
            count = (gl.minimum(length - start, LEAF) + TILE - 1) // TILE
            # Above every masked score, so that the weight of one is 0 even in a row that has seen no key yet.
            row_max = gl.full([64], NO_KEYS, gl.float32, SR)
            row_sum = gl.full([64], 0.0, gl.float32, SR)
            acc = gl.zeros([64, 256], gl.float32, VALUES)
            for i in range(count):
                s = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(left_full.index(s), phase)
                part = warpgroup_mma(q_rope, rope.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
                part = warpgroup_mma(q_left, left.index(s).permute((1, 0)), part, is_async=True)
                mbarrier.wait(right_full.index(s), phase)
                part = warpgroup_mma(q_right, right.index(s).permute((1, 0)), part, is_async=True)
                scores = warpgroup_mma_wait(0, deps=[part])
                first = start + i * TILE
                if first + TILE > length - q_len + 1:
                    scores = gl.where((first + column)[None, :] <= (row * 0 + last_seen)[:, None], scores, MASKED)
                new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
                weights = gl.exp2(scores * scale_log2 - new_max[:, None])
                decay = gl.exp2(row_max - new_max)
                row_max = new_max
                half = weights.to(gl.bfloat16)
                mbarrier.wait(hand_empty, (step & 1) ^ 1)
                handed.store(half)
                decays.store(decay)
                thread_barrier()
                mbarrier.arrive(hand_full, count=1)
                row_sum = gl.fma(row_sum, decay, gl.sum(weights, 1))
                acc = acc * gl.convert_layout(decay, OR)[:, None]
                if first + TILE > length:
                    clear_tail(left.index(s), length - first, TILE)
                values = warpgroup_mma(gl.convert_layout(half, P), left.index(s), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[values])
                mbarrier.arrive(left_empty.index(s), count=1)
                step += 1
            if n == leaves - 1:
                mbarrier.arrive(q_empty, count=1)
            # Addresses are computed here once more: kept, they would cost registers in the loop.
            row = opaque(gl.arange(0, 64, SR))
            out_row = opaque(gl.arange(0, 64, OR))
            live = row < q_len * HEADS - tile * 64
            out_live = (out_row < q_len * HEADS - tile * 64)[:, None]
            if slot >= 0:
                at = slot.to(gl.int64) * SLOT_ROWS
                gl.store(acc_ptr + at * 512 + part_at(out_row, dim, SLOT_ROWS), acc, mask=out_live)
                gl.store(row_max_ptr + at + row, row_max, mask=live)
                gl.store(row_sum_ptr + at + row, row_sum, mask=live)
            else:
                # The reference moves only where a leaf rises far above it: see `join`.
                new_max = gl.where(row_max > run_max + FAR, row_max, run_max)
                keep = gl.exp2(run_max - new_max)
                weight = gl.exp2(row_max - new_max)
                run_sum = gl.where(n == 0, row_sum, gl.fma(run_sum, keep, row_sum * weight))
                run_max = new_max
                share = 1.0 / gl.where(run_sum == 0.0, 1.0, run_sum)
                mbarrier.wait(fold_empty, ((turns >> 16) & 1) ^ 1)
                folds.index(0).store(keep)
                folds.index(1).store(weight)
                folds.index(2).store(share)
                if WANTS_LSE:
                    folds.index(3).store(gl.where(run_sum == 0.0, float("-inf"), (run_max + gl.log2(run_sum)) * LN_2))
                thread_barrier()
                mbarrier.arrive(fold_full, count=1)
                turns ^= 65536
                factors = (gl.convert_layout(keep, OR), gl.convert_layout(weight, OR))
                sums = sum_ptr + opaque(gl.program_id(0)) * (64 * 512)
                acc = join(sums, acc, n, leaves, factors, has_moved(folds.index(0)), out_row, dim, out_live, 0)
                if n == leaves - 1:
                    at = (q_start * HEADS + tile * 64).to(gl.int64)
                    result = (acc * gl.convert_layout(share, OR)[:, None]).to(gl.bfloat16)
                    gl.store(out_ptr + (at + out_row)[:, None] * 512 + dim[None, :], result, mask=out_live)
        turns = (turns & 65536) | ((turns + 1) & 3)
        q_start, q_len, tile, leaf, leaves, length, slot = take(work[0], work[1], work[2], turns)
