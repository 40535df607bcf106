"""The consumer of mla_decode for Hopper where heads are few and each sequence has one query.

Knows no order of work. A product has at least 64 rows but may have 16 columns, so the latents are its rows and the
queries its columns: nothing is computed for rows that nobody asked for, and the sums of a leaf and of a group of leaves
both stay in registers.
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
from kernels.hopper.registers import opaque
from kernels.hopper.work_queue import take
from kernels.mla_decode.hopper.pieces import clear_tail, fold
from kernels.softmax.triton import LN_2, MASKED, NO_KEYS


@gluon.jit
def scores_of(q, latents, s, phase, full, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Products of a tile's latents with every query, [latents, rows]."""
    left, right, rope = latents
    left_full, right_full = full
    zeros = gl.zeros([TILE, 16], gl.float32, LAYOUT)
    mbarrier.wait(left_full.index(s), phase)
    part = warpgroup_mma(rope.index(s), q[2].permute((1, 0)), zeros, use_acc=False, is_async=True)
    part = warpgroup_mma(left.index(s), q[0].permute((1, 0)), part, is_async=True)
    mbarrier.wait(right_full.index(s), phase)
    part = warpgroup_mma(right.index(s), q[1].permute((1, 0)), part, is_async=True)
    return warpgroup_mma_wait(0, deps=[part])


@gluon.jit
def places(dim, row):
    """As `pieces.part_at`, for a result whose rows are the values' dimensions."""
    dim = opaque(dim)
    return (dim // 8 * 128 + dim % 8)[:, None] + (opaque(row) * 8)[None, :]


@gluon.jit
def settle(group, sums, to, dim, row, factors, ends, live):
    """Half of a group's values joins the sum, which the last group's makes the answer."""
    keep, weight, share = factors
    is_later, is_last = ends
    at = places(dim, row)
    if is_later:
        group = fold(sums, at, group, keep, weight, live[None, :])
    if is_last:
        here = (opaque(row) * 512)[None, :] + opaque(dim)[:, None]
        gl.store(to + here, (group * share).to(gl.bfloat16), mask=live[None, :])
    else:
        gl.store(sums + at, group, mask=live[None, :])


@gluon.jit
def attend_few(
    results,
    scale_log2,
    num_tokens,
    shared,
    bars,
    mailbox,
    HEADS: gl.constexpr,
    LEAF: gl.constexpr,
    GROUP: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    out_ptr, lse_ptr, acc_ptr, peak_ptr, total_ptr, sum_ptr = results
    q_left, q_right, q_rope, left, right, rope = shared[0]
    handed = shared[1]
    q_full, q_empty, left_full, left_empty, right_full, right_empty = bars
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    ACROSS: gl.constexpr = gl.SliceLayout(0, L)
    DOWN: gl.constexpr = gl.SliceLayout(1, L)
    row = gl.arange(0, 16, ACROSS)
    live = row < HEADS
    key = gl.arange(0, TILE, DOWN)
    dim = gl.arange(0, 256, DOWN)
    q = (q_left, q_right, q_rope)
    step = 0
    turn = 0
    seq, _q_len, _tile, leaf, leaves, length, slot = take(mailbox[0], mailbox[1], mailbox[2], turn)
    while leaves >= 0:
        mbarrier.wait(q_full, turn & 1)
        sum_peak = gl.full([16], NO_KEYS, gl.float32, ACROSS)
        sum_total = gl.full([16], 0.0, gl.float32, ACROSS)
        for first in range(0, leaves, GROUP):
            group_peak = gl.full([16], NO_KEYS, gl.float32, ACROSS)
            group_total = gl.full([16], 0.0, gl.float32, ACROSS)
            group_low = gl.zeros([256, 16], gl.float32, L)
            group_high = gl.zeros([256, 16], gl.float32, L)
            for n in range(first, gl.minimum(first + GROUP, leaves)):
                start = (leaf + n) * LEAF
                # Above every masked score, so that the weight of one is 0 even in a row that has seen no key yet.
                peak = gl.full([16], NO_KEYS, gl.float32, ACROSS)
                totals = gl.zeros([TILE, 16], gl.float32, L)
                low = gl.zeros([256, 16], gl.float32, L)
                high = gl.zeros([256, 16], gl.float32, L)
                for at in range(start, gl.minimum(length, start + LEAF), TILE):
                    s = step % STAGES
                    scores = scores_of(
                        q, (left, right, rope), s, (step // STAGES) & 1, (left_full, right_full), TILE, L
                    )
                    if at + TILE > length:
                        scores = gl.where((at + key < length)[:, None], scores, MASKED)
                    new_peak = gl.maximum(peak, gl.max(scores, 0) * scale_log2)
                    weights = gl.exp2(scores * scale_log2 - new_peak[None, :])
                    decay = gl.exp2(peak - new_peak)[None, :]
                    peak = new_peak
                    # All have read the last tile's weights: their maximum went through a barrier.
                    handed.store(weights.to(gl.bfloat16))
                    fence_async_shared()
                    if at + TILE > length:
                        clear_tail(left.index(s), length - at, TILE)
                        clear_tail(right.index(s), length - at, TILE)
                    thread_barrier()
                    low = warpgroup_mma(left.index(s).permute((1, 0)), handed, low * decay, is_async=True)
                    high = warpgroup_mma(right.index(s).permute((1, 0)), handed, high * decay, is_async=True)
                    totals = gl.fma(totals, decay + gl.zeros_like(totals), weights)
                    low = warpgroup_mma_wait(1, deps=[low])
                    mbarrier.arrive(left_empty.index(s), count=1)
                    high = warpgroup_mma_wait(0, deps=[high])
                    mbarrier.arrive(right_empty.index(s), count=1)
                    step += 1
                new_peak = gl.maximum(group_peak, peak)
                keep = gl.exp2(group_peak - new_peak)
                weight = gl.exp2(peak - new_peak)
                group_total = gl.fma(group_total, keep, gl.sum(totals, 0) * weight)
                group_low = gl.fma(group_low, keep[None, :] + gl.zeros_like(low), low * weight[None, :])
                group_high = gl.fma(group_high, keep[None, :] + gl.zeros_like(high), high * weight[None, :])
                group_peak = new_peak
            if first + GROUP >= leaves:
                mbarrier.arrive(q_empty, count=1)
            if slot >= 0:
                at_row = opaque(slot).to(gl.int64) * 16
                to = acc_ptr + at_row * 512 + places(dim, row)
                gl.store(to, group_low, mask=live[None, :])
                gl.store(to + 256 * 16, group_high, mask=live[None, :])
                gl.store(peak_ptr + at_row + opaque(row), group_peak, mask=live)
                gl.store(total_ptr + at_row + opaque(row), group_total, mask=live)
            else:
                new_peak = gl.maximum(sum_peak, group_peak)
                keep = gl.exp2(sum_peak - new_peak)
                weight = gl.exp2(group_peak - new_peak)
                sum_total = gl.fma(sum_total, keep, group_total * weight)
                sum_peak = new_peak
                share = 1.0 / gl.where(sum_total == 0.0, 1.0, sum_total)
                ends = (first > 0, first + GROUP >= leaves)
                factors = (keep[None, :], weight[None, :], share[None, :])
                sums = sum_ptr + opaque(gl.program_id(0)) * (16 * 512)
                answer = out_ptr + opaque(seq).to(gl.int64) * (HEADS * 512)
                settle(group_low, sums, answer, dim, row, factors, ends, live)
                settle(group_high, sums, answer, 256 + dim, row, factors, ends, live)
                if WANTS_LSE:
                    lse = gl.where(sum_total == 0.0, float("-inf"), (sum_peak + gl.log2(sum_total)) * LN_2)
                    gl.store(lse_ptr + opaque(row).to(gl.int64) * num_tokens + seq, lse, mask=live & ends[1])
        turn += 1
        seq, _q_len, _tile, leaf, leaves, length, slot = take(mailbox[0], mailbox[1], mailbox[2], turn)
