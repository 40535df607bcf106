"""Scores of a launch of few rows: one program for a tile of 64 keys and 64 heads of a query."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.gathered.few.tiles import tile_of, tile_slot
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.softmax.triton import MASKED


@gluon.jit
def score_tile(
    q_ptr, keys, scratch, scale_log2, key_tiles,
    COUNT: gl.constexpr, LIST: gl.constexpr, ROWS: gl.constexpr, ADDRESSES: gl.constexpr,
    HEADS: gl.constexpr, ROPE: gl.constexpr, ARRIVALS: gl.constexpr,
):  # fmt: skip
    """Writes scores [64, 64] and each head's maximum, scaled; clears the ARRIVALS counters of a query."""
    # In this order: the next launches read what the rows are before they wait.
    wait_for_last_launch()
    allow_next_launch()
    scores_ptr, peaks_ptr, _, _, _, _, _, _, arrivals_ptr = scratch
    WIDTH: gl.constexpr = 512 + ROPE
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Eight threads for 128 bytes of a row, four rows of a warp.
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    token, head_tile, key_tile = tile_of(gl.program_id(0), key_tiles, HEADS)
    first = key_tile * 64
    q_left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, ROPE], LAYOUT) if ROPE else q_left
    left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    right = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    rope = gl.allocate_shared_memory(gl.bfloat16, [64, ROPE], LAYOUT) if ROPE else left
    at = gl.arange(0, 64, gl.SliceLayout(1, L))
    stop = COUNT(keys, token)
    of_token = LIST(keys, token, first, at)
    half = gl.arange(0, 256, gl.SliceLayout(0, L))
    tail = gl.arange(0, 64, gl.SliceLayout(0, L))
    # What lies behind the last head stays as it is: results of such rows are not used.
    head = head_tile * 64 + at
    q_at = q_ptr + ((token * HEADS + head).to(gl.int64) * WIDTH)[:, None]
    live = (head < HEADS)[:, None]
    if ROPE:
        async_copy.async_copy_global_to_shared(q_rope, q_at + (512 + tail)[None, :], mask=live)
    async_copy.async_copy_global_to_shared(q_left, q_at + half[None, :], mask=live)
    if (head_tile == 0) & (key_tile == 0):
        counter = gl.arange(0, ARRIVALS, gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(arrivals_ptr + token * ARRIVALS + counter, gl.zeros_like(counter))
    if first < stop:
        from_ptr = ADDRESSES(keys, ROWS(keys, of_token, first, stop, at))[:, None]
        if ROPE:
            async_copy.async_copy_global_to_shared(rope, from_ptr + (512 + tail)[None, :])
        async_copy.async_copy_global_to_shared(left, from_ptr + half[None, :])
        async_copy.commit_group()
        async_copy.async_copy_global_to_shared(q_right, q_at + (256 + half)[None, :], mask=live)
        async_copy.async_copy_global_to_shared(right, from_ptr + (256 + half)[None, :])
        async_copy.commit_group()
        async_copy.wait_group(1)
        thread_barrier()
        fence_async_shared()
        zeros = gl.zeros([64, 64], gl.float32, SCORES)
        if ROPE:
            part = warpgroup_mma(q_rope, rope.permute((1, 0)), zeros, use_acc=False, is_async=True)
            part = warpgroup_mma(q_left, left.permute((1, 0)), part, is_async=True)
        else:
            part = warpgroup_mma(q_left, left.permute((1, 0)), zeros, use_acc=False, is_async=True)
        async_copy.wait_group(0)
        thread_barrier()
        fence_async_shared()
        part = warpgroup_mma(q_right, right.permute((1, 0)), part, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[part])
        row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        column = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
        scores = gl.where((first + column)[None, :] < stop, scores, MASKED)
        slot = tile_slot(token, head_tile, key_tile, key_tiles, HEADS)
        gl.store(scores_ptr + slot * 4096 + row[:, None] * 64 + column[None, :], scores)
        gl.store(peaks_ptr + slot * 64 + row, gl.max(scores, 1) * scale_log2)
