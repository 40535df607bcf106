"""The right consumer of mla_decode for Hopper: the last 256 dimensions of the values, with the left one's weights."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.work_queue import take
from kernels.mla_decode.hopper.leaves import clear_tail, has_moved, join, part_at


@gluon.jit
def attend_right(
    results,
    num_tokens,
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
    out_ptr, lse_ptr, acc_ptr, _, _, sum_ptr = results
    _, _, _, _, right, _ = shared[0]
    handed, decays, folds = shared[1]
    _, _, _, _, _, right_empty = bars[0]
    hand_full, hand_empty, fold_full, fold_empty = bars[1]
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=VALUES, k_width=2)
    OR: gl.constexpr = gl.SliceLayout(1, VALUES)
    row = gl.arange(0, 64, OR)
    dim = 256 + gl.arange(0, 256, gl.SliceLayout(0, VALUES))
    step = 0
    # One register for two counts: items below, leaves that were added from bit 16 on.
    turns = 0
    q_start, q_len, tile, leaf, leaves, length, slot = take(work[0], work[1], work[2], turns)
    while leaves >= 0:
        live = (row < q_len * HEADS - tile * 64)[:, None]
        for n in range(leaves):
            start = (leaf + n) * LEAF
            count = (gl.minimum(length - start, LEAF) + TILE - 1) // TILE
            acc = gl.zeros([64, 256], gl.float32, VALUES)
            for i in range(count):
                s = step % STAGES
                mbarrier.wait(hand_full, step & 1)
                weights = handed.load(P)
                decay = decays.load(OR)
                thread_barrier()
                mbarrier.arrive(hand_empty, count=1)
                acc = acc * decay[:, None]
                if start + (i + 1) * TILE > length:
                    clear_tail(right.index(s), length - start - i * TILE, TILE)
                values = warpgroup_mma(weights, right.index(s), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[values])
                mbarrier.arrive(right_empty.index(s), count=1)
                step += 1
            if slot >= 0:
                at = slot.to(gl.int64) * SLOT_ROWS
                gl.store(acc_ptr + at * 512 + part_at(row, dim, SLOT_ROWS), acc, mask=live)
            else:
                mbarrier.wait(fold_full, (turns >> 16) & 1)
                keep = folds.index(0).load(OR)
                weight = folds.index(1).load(OR)
                share = folds.index(2).load(OR)
                if WANTS_LSE:
                    lse = folds.index(3).load(OR)
                moved = has_moved(folds.index(0))
                thread_barrier()
                mbarrier.arrive(fold_empty, count=1)
                turns ^= 65536
                sums = sum_ptr + gl.program_id(0) * (64 * 512)
                acc = join(sums, acc, n, leaves, (keep, weight), moved, row, dim, live, 256)
                if n == leaves - 1:
                    if WANTS_LSE:
                        token = gl.minimum((tile * 64 + row) // HEADS, q_len - 1)
                        lse_at = ((tile * 64 + row) % HEADS).to(gl.int64) * num_tokens + q_start + token
                        gl.store(lse_ptr + lse_at, lse, mask=row < q_len * HEADS - tile * 64)
                    at = (q_start * HEADS + tile * 64).to(gl.int64)
                    result = (acc * share[:, None]).to(gl.bfloat16)
                    gl.store(out_ptr + (at + row)[:, None] * 512 + dim[None, :], result, mask=live)
        turns = (turns & 65536) | ((turns + 1) & 3)
        q_start, q_len, tile, leaf, leaves, length, slot = take(work[0], work[1], work[2], turns)
