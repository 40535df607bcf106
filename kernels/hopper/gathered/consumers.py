"""The consumers of attention over gathered keys: a tile of 64 of them is keys to both, and values by halves.

left     scores = q . key over all dimensions, softmax, weights to shared memory; values 0 .. 255
right    takes the weights; values 256 .. 511; it computes while left does the next softmax
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.gathered.items import item_of, part_at, settle, share_of
from kernels.hopper.gathered.weights import sum_of_tile, top_behind, weights_of_scores
from kernels.hopper.registers import opaque
from kernels.hopper.rescale import rescaled
from kernels.softmax.triton import MASKED, NO_KEYS


@gluon.jit
def attend_left(
    results, keys, scale_log2, items, shared, handed, bars, hands,
    COUNT: gl.constexpr, SPLITS: gl.constexpr, pieces, PIECE: gl.constexpr, HEADS: gl.constexpr, ROPE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    out_ptr, _, acc_ptr, row_max_ptr, row_sum_ptr = results
    q_left, q_right, q_rope, left, right, rope = shared
    passed, decays, folds = handed
    q_full, q_empty, left_full, left_empty, right_full, _ = bars
    hand_full, hand_empty, fold_full, fold_empty = hands
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=VALUES, k_width=2)
    SR: gl.constexpr = gl.SliceLayout(1, SCORES)
    OR: gl.constexpr = gl.SliceLayout(1, VALUES)
    column = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    dim = gl.arange(0, 256, gl.SliceLayout(0, VALUES))
    zeros = gl.zeros([64, 64], gl.float32, SCORES)
    step = 0
    turn = 0
    folded = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, tile, start, stop = item_of(item, keys, COUNT, SPLITS, pieces, PIECE, HEADS)
        if start < stop:
            mbarrier.wait(q_full.index(0), turn & 1)
            run_max = gl.full([64], NO_KEYS, gl.float32, SR)
            run_sum = gl.full([64], 0.0, gl.float32, SR)
            for begin in range(start, stop, PIECE):
                end = gl.minimum(begin + PIECE, stop)
                # Above every masked score, so that the weight of one is 0.
                row_max = gl.full([64], NO_KEYS, gl.float32, SR)
                row_sum = gl.full([64], 0.0, gl.float32, SR)
                acc = gl.zeros([64, 256], gl.float32, VALUES)
                for first in range(begin, end, 64):
                    s = step % STAGES
                    phase = (step // STAGES) & 1
                    mbarrier.wait(left_full.index(s), phase)
                    fence_async_shared()
                    if ROPE:
                        part = warpgroup_mma(q_rope, rope.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
                        part = warpgroup_mma(q_left, left.index(s).permute((1, 0)), part, is_async=True)
                    else:
                        part = warpgroup_mma(q_left, left.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
                    mbarrier.wait(right_full.index(s), phase)
                    fence_async_shared()
                    part = warpgroup_mma(q_right, right.index(s).permute((1, 0)), part, is_async=True)
                    scores = warpgroup_mma_wait(0, deps=[part])
                    if first + 64 > stop:
                        scores = gl.where((first + column)[None, :] < stop, scores, MASKED)
                    new_max = top_behind(row_max, scores, scale_log2)
                    weights = weights_of_scores(scores, scale_log2, new_max)
                    decay = gl.exp2(row_max - new_max)
                    row_max = new_max
                    narrow = weights.to(gl.bfloat16)
                    mbarrier.wait(hand_empty.index(0), (step & 1) ^ 1)
                    passed.store(narrow)
                    decays.store(decay)
                    thread_barrier()
                    mbarrier.arrive(hand_full.index(0), count=1)
                    row_sum = gl.fma(row_sum, decay, sum_of_tile(weights))
                    acc = rescaled(acc, gl.convert_layout(decay, OR))
                    values = warpgroup_mma(gl.convert_layout(narrow, P), left.index(s), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[values])
                    mbarrier.arrive(left_empty.index(s), count=1)
                    step += 1
                if end == stop:
                    mbarrier.arrive(q_empty.index(0), count=1)
                # Addresses are computed here once more: kept, they would cost registers in the loop.
                row = opaque(gl.arange(0, 64, SR))
                out_row = opaque(gl.arange(0, 64, OR))
                if SPLITS:
                    slot = opaque(item)
                    gl.store(acc_ptr + slot.to(gl.int64) * (64 * 512) + part_at(out_row, dim), acc)
                    gl.store(row_max_ptr + slot * 64 + row, row_max)
                    gl.store(row_sum_ptr + slot * 64 + row, row_sum)
                else:
                    new_max = gl.maximum(run_max, row_max)
                    keep = gl.exp2(run_max - new_max)
                    weight = gl.exp2(row_max - new_max)
                    run_sum = gl.where(begin == 0, row_sum, gl.fma(run_sum, keep, row_sum * weight))
                    run_max = new_max
                    share = share_of(results, run_max, run_sum, tile * 64, row, HEADS)
                    mbarrier.wait(fold_empty.index(0), (folded & 1) ^ 1)
                    folds.index(0).store(keep)
                    folds.index(1).store(weight)
                    folds.index(2).store(share)
                    thread_barrier()
                    mbarrier.arrive(fold_full.index(0), count=1)
                    folded += 1
                    sums = acc_ptr + opaque(gl.program_id(0)).to(gl.int64) * (64 * 512)
                    factors = (gl.convert_layout(keep, OR), gl.convert_layout(weight, OR))
                    acc = settle(sums, acc, factors, begin == 0, end == stop, out_row, dim)
                    if end == stop:
                        result = (acc * gl.convert_layout(share, OR)[:, None]).to(gl.bfloat16)
                        to = out_ptr + (token.to(gl.int64) * HEADS + tile * 64) * 512
                        gl.store(to + out_row[:, None] * 512 + dim[None, :], result,
                                 mask=(out_row < HEADS - tile * 64)[:, None])  # fmt: skip
            turn += 1
        elif not SPLITS:
            row = opaque(gl.arange(0, 64, OR))
            to = out_ptr + (token.to(gl.int64) * HEADS + tile * 64) * 512
            gl.store(to + row[:, None] * 512 + dim[None, :], gl.zeros([64, 256], gl.bfloat16, VALUES),
                     mask=(row < HEADS - tile * 64)[:, None])  # fmt: skip


@gluon.jit
def attend_right(
    results, keys, items, shared, handed, bars, hands,
    COUNT: gl.constexpr, SPLITS: gl.constexpr, pieces, PIECE: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    out_ptr, _, acc_ptr, _, _ = results
    _, _, _, _, right, _ = shared
    passed, decays, folds = handed
    _, _, _, _, _, right_empty = bars
    hand_full, hand_empty, fold_full, fold_empty = hands
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=VALUES, k_width=2)
    OR: gl.constexpr = gl.SliceLayout(1, VALUES)
    row = gl.arange(0, 64, OR)
    dim = 256 + gl.arange(0, 256, gl.SliceLayout(0, VALUES))
    step = 0
    folded = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, tile, start, stop = item_of(item, keys, COUNT, SPLITS, pieces, PIECE, HEADS)
        if start < stop:
            for begin in range(start, stop, PIECE):
                end = gl.minimum(begin + PIECE, stop)
                acc = gl.zeros([64, 256], gl.float32, VALUES)
                for _first in range(begin, end, 64):
                    s = step % STAGES
                    mbarrier.wait(hand_full.index(0), step & 1)
                    weights = passed.load(P)
                    decay = decays.load(OR)
                    thread_barrier()
                    mbarrier.arrive(hand_empty.index(0), count=1)
                    acc = rescaled(acc, decay)
                    fence_async_shared()
                    values = warpgroup_mma(weights, right.index(s), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[values])
                    mbarrier.arrive(right_empty.index(s), count=1)
                    step += 1
                if SPLITS:
                    gl.store(acc_ptr + opaque(item).to(gl.int64) * (64 * 512) + part_at(row, dim), acc)
                else:
                    mbarrier.wait(fold_full.index(0), folded & 1)
                    factors = (folds.index(0).load(OR), folds.index(1).load(OR))
                    share = folds.index(2).load(OR)
                    thread_barrier()
                    mbarrier.arrive(fold_empty.index(0), count=1)
                    folded += 1
                    sums = acc_ptr + opaque(gl.program_id(0)).to(gl.int64) * (64 * 512)
                    acc = settle(sums, acc, factors, begin == 0, end == stop, row, dim)
                    if end == stop:
                        result = (acc * share[:, None]).to(gl.bfloat16)
                        to = out_ptr + (token.to(gl.int64) * HEADS + tile * 64) * 512
                        gl.store(to + opaque(row)[:, None] * 512 + dim[None, :], result,
                                 mask=(row < HEADS - tile * 64)[:, None])  # fmt: skip
        elif not SPLITS:
            to = out_ptr + (token.to(gl.int64) * HEADS + tile * 64) * 512
            gl.store(to + opaque(row)[:, None] * 512 + dim[None, :], gl.zeros([64, 256], gl.bfloat16, VALUES),
                     mask=(row < HEADS - tile * 64)[:, None])  # fmt: skip
