"""The consumer of mla_decode cut by load where heads are few and each sequence has one query.

A product has at least 64 rows but may have 16 columns, so the latents are its rows and the queries its columns: no rows
are computed in vain.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import fence_async_global, thread_barrier
from kernels.hopper.registers import opaque, opaque_zero_of
from kernels.hopper.work_queue import take
from kernels.mla_decode.hopper.few_parts import part_scores, store_heads
from kernels.mla_decode.hopper.few_tile import add_tile
from kernels.mla_decode.hopper.fold_together import fold_together
from kernels.mla_decode.hopper.parts import level, share
from kernels.softmax.triton import LN_2, NO_KEYS


@gluon.jit
def scores_of(q, buffer, latents, full, s, phase, TILE: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the products of a tile's latents with every query, [latents, rows]."""
    left, right, rope = latents
    left_full, right_full, rope_full = full
    if ROWS == 32:
        # Known from the item's start on, descriptors of the queries would be kept, two registers for each product.
        buffer += opaque_zero_of(s)
    q_left, q_right, q_rope = q[0].index(buffer), q[1].index(buffer), q[2].index(buffer)
    zeros = gl.zeros([TILE, ROWS], gl.float32, LAYOUT)
    mbarrier.wait(rope_full.index(s), phase)
    part = warpgroup_mma(rope.index(s), q_rope.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(left_full.index(s), phase)
    part = warpgroup_mma(left.index(s), q_left.permute((1, 0)), part, is_async=True)
    mbarrier.wait(right_full.index(s), phase)
    part = warpgroup_mma(right.index(s), q_right.permute((1, 0)), part, is_async=True)
    return warpgroup_mma_wait(0, deps=[part])


@gluon.jit
def attend_few_run(
    results,
    together,
    stored_ptr,
    scale_log2,
    num_tokens,
    shared,
    bars,
    work,
    HEADS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    TOGETHER: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    out_ptr, lse_ptr, parts_ptr, levels_ptr = results
    _, _, _, left, right, rope = shared[0]
    handed = shared[1]
    q_full, q_empty, left_full, left_empty, right_full, right_empty = bars[0]
    rope_full, rope_empty = bars[1]
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    ACROSS: gl.constexpr = gl.SliceLayout(0, L)
    DOWN: gl.constexpr = gl.SliceLayout(1, L)
    key = gl.arange(0, TILE, DOWN)
    step = 0
    turn = 0
    q_start, others, part, begin, stop, length, slot = take(work[0], work[1], work[2], turn)
    while stop >= 0:
        buffer = turn % 2
        mbarrier.wait(q_full.index(buffer), (turn // 2) & 1)
        # Above every masked score, so that the weight of one is 0 even in a row that has seen no key yet.
        row_max = gl.full([ROWS], NO_KEYS, gl.float32, ACROSS)
        sums = gl.zeros([TILE, ROWS], gl.float32, L)
        low = gl.zeros([256, ROWS], gl.float32, L)
        high = gl.zeros([256, ROWS], gl.float32, L)
        for first in range(begin, stop + gl.maximum(others, 0) * TILE, TILE):
            s = step % STAGES
            phase = (step // STAGES) & 1
            full = (left_full, right_full, rope_full)
            is_part = first >= stop
            if is_part:
                level_ptr = levels_ptr + (slot + 1 + (first - stop) // TILE) * SLOT_ROWS
                scores = part_scores(level_ptr, key, full, s, phase, HEADS, ROWS, L)
            else:
                scores = scores_of(shared[0], buffer, (left, right, rope), full, s, phase, TILE, ROWS, L)
            mbarrier.arrive(rope_empty.index(s), count=1)
            end = gl.where(is_part, first + TILE, length)
            scale = gl.where(is_part, 1.0, scale_log2)  # levels are logarithms to base 2
            row_max, sums, low, high = add_tile(
                scores, (row_max, sums, low, high), first, end, (left, right), (left_empty, right_empty), s, handed,
                key, scale, TILE, is_part,
            )  # fmt: skip
            step += 1
        mbarrier.arrive(q_empty.index(buffer), count=1)
        total = gl.sum(sums, 0)
        row = opaque(gl.arange(0, ROWS, ACROSS))
        reached = level(row_max, total)
        live = row < HEADS
        is_stored = (slot >= 0) & (others <= 0)
        gl.store(levels_ptr + slot * SLOT_ROWS + row, reached, mask=live & is_stored)
        if WANTS_LSE:
            gl.store(lse_ptr + row.to(gl.int64) * num_tokens + q_start, reached * LN_2, mask=live & (is_stored == 0))
        to_ptr = out_ptr + q_start.to(gl.int64) * (HEADS * 512)
        if is_stored:
            to_ptr = parts_ptr + slot.to(gl.int64) * (SLOT_ROWS * 512)
        store_heads(to_ptr, low * share(total)[None, :], HEADS, ROWS)
        store_heads(to_ptr + 256, high * share(total)[None, :], HEADS, ROWS)
        if others < 0:
            fence_async_global()  # another program's copy engine reads it
            thread_barrier()
            gl.atomic_add(stored_ptr + slot - part, 1, sem="release", scope="gpu")
        turn += 1
        q_start, others, part, begin, stop, length, slot = take(work[0], work[1], work[2], turn)
    if TOGETHER:
        fold_together(results, together, num_tokens, 2, HEADS, SLOT_ROWS, True, WANTS_LSE)
