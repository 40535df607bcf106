"""The consumer of mla_decode for Hopper where heads are few and each sequence has one query.

A product has at least 64 rows but may have 16 columns, so the latents are its rows and the queries its columns: no rows
are computed in vain, and the sums of a leaf and of a group of leaves both stay in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.registers import opaque
from kernels.hopper.work_queue import take
from kernels.mla_decode.hopper.few_tile import add_tile
from kernels.mla_decode.hopper.leaves import fold, leaf_tiles
from kernels.softmax.triton import LN_2, NO_KEYS


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
    """Returns offsets of a result whose rows are the values' dimensions: 8 of a head, then 8 of the next head."""
    dim = opaque(dim)
    return (dim // 8 * 128 + dim % 8)[:, None] + (opaque(row) * 8)[None, :]


@gluon.jit
def settle(group, sums, to, dim, row, factors, ends, live):
    """Adds half of a group's values to the sum in memory, or writes the output if the group is the last."""
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
    work,
    HEADS: gl.constexpr,
    LEAF: gl.constexpr,
    SHORT: gl.constexpr,
    LEAVES_PER_GROUP: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    out_ptr, lse_ptr, acc_ptr, row_max_ptr, row_sum_ptr, sum_ptr = results
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
    seq, _q_len, _tile, leaf, leaves, length, slot = take(work[0], work[1], work[2], turn)
    while leaves >= 0:
        mbarrier.wait(q_full, turn & 1)
        per_leaf = leaf_tiles(length, LEAF, SHORT, TILE, False) * TILE
        run_max = gl.full([16], NO_KEYS, gl.float32, ACROSS)
        run_sum = gl.full([16], 0.0, gl.float32, ACROSS)
        for first in range(0, leaves, LEAVES_PER_GROUP):
            group_max = gl.full([16], NO_KEYS, gl.float32, ACROSS)
            group_sum = gl.full([16], 0.0, gl.float32, ACROSS)
            group_low = gl.zeros([256, 16], gl.float32, L)
            group_high = gl.zeros([256, 16], gl.float32, L)
            for n in range(first, gl.minimum(first + LEAVES_PER_GROUP, leaves)):
                start = (leaf + n) * per_leaf
                # Above every masked score, so that the weight of one is 0 even in a row that has seen no key yet.
                row_max = gl.full([16], NO_KEYS, gl.float32, ACROSS)
                partial_sums = gl.zeros([TILE, 16], gl.float32, L)
                low = gl.zeros([256, 16], gl.float32, L)
                high = gl.zeros([256, 16], gl.float32, L)
                for at in range(start, gl.minimum(length, start + per_leaf), TILE):
                    s = step % STAGES
                    scores = scores_of(
                        q, (left, right, rope), s, (step // STAGES) & 1, (left_full, right_full), TILE, L
                    )
                    row_max, partial_sums, low, high = add_tile(
                        scores, (row_max, partial_sums, low, high), at, length, (left, right),
                        (left_empty, right_empty), s, handed, key, scale_log2, TILE,
                    )  # fmt: skip
                    step += 1
                new_max = gl.maximum(group_max, row_max)
                keep = gl.exp2(group_max - new_max)
                weight = gl.exp2(row_max - new_max)
                group_sum = gl.fma(group_sum, keep, gl.sum(partial_sums, 0) * weight)
                group_low = gl.fma(group_low, keep[None, :] + gl.zeros_like(low), low * weight[None, :])
                group_high = gl.fma(group_high, keep[None, :] + gl.zeros_like(high), high * weight[None, :])
                group_max = new_max
            if first + LEAVES_PER_GROUP >= leaves:
                mbarrier.arrive(q_empty, count=1)
            if slot >= 0:
                at_row = opaque(slot).to(gl.int64) * 16
                to = acc_ptr + at_row * 512 + places(dim, row)
                gl.store(to, group_low, mask=live[None, :])
                gl.store(to + 256 * 16, group_high, mask=live[None, :])
                gl.store(row_max_ptr + at_row + opaque(row), group_max, mask=live)
                gl.store(row_sum_ptr + at_row + opaque(row), group_sum, mask=live)
            else:
                new_max = gl.maximum(run_max, group_max)
                keep = gl.exp2(run_max - new_max)
                weight = gl.exp2(group_max - new_max)
                run_sum = gl.fma(run_sum, keep, group_sum * weight)
                run_max = new_max
                share = 1.0 / gl.where(run_sum == 0.0, 1.0, run_sum)
                ends = (first > 0, first + LEAVES_PER_GROUP >= leaves)
                factors = (keep[None, :], weight[None, :], share[None, :])
                sums = sum_ptr + opaque(gl.program_id(0)) * (16 * 512)
                target = out_ptr + opaque(seq).to(gl.int64) * (HEADS * 512)
                settle(group_low, sums, target, dim, row, factors, ends, live)
                settle(group_high, sums, target, 256 + dim, row, factors, ends, live)
                if WANTS_LSE:
                    lse = gl.where(run_sum == 0.0, float("-inf"), (run_max + gl.log2(run_sum)) * LN_2)
                    gl.store(lse_ptr + opaque(row).to(gl.int64) * num_tokens + seq, lse, mask=live & ends[1])
        turn += 1
        seq, _q_len, _tile, leaf, leaves, length, slot = take(work[0], work[1], work[2], turn)
