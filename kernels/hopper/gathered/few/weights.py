"""Weights of a launch of few rows: one program for KEYS keys, a tile of 64 or half of one, and 64 heads of a query."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.gathered.few.tiles import heads_and_keys, tile_slot
from kernels.hopper.gathered.weights import sum_of_tile, top_of, weights_of_scores
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.softmax.triton import MASKED, NO_KEYS


@gluon.jit
def weigh_keys(
    q_ptr, keys, scratch, scale_log2, key_tiles,
    READ: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, ADDRESSES: gl.constexpr,
    HEADS: gl.constexpr, ROPE: gl.constexpr, KEYS: gl.constexpr, ARRIVALS: gl.constexpr,
):  # fmt: skip
    """Writes weights [64, KEYS], for each head the top of their scores and their sum; clears the ARRIVALS counters of
    a query.

    Of a tile that has keys both halves are written.
    """
    # In this order: the next launches read what the rows are before they wait.
    wait_for_last_launch()
    allow_next_launch()
    weights_ptr, tops_ptr, sums_ptr, _, _, arrivals_ptr = scratch
    WIDTH: gl.constexpr = 512 + ROPE
    EACH: gl.constexpr = 64 // KEYS
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Eight threads for 128 bytes of a row, four rows of a warp.
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    token = gl.program_id(1)
    head_tile, part = heads_and_keys(HEADS)
    first = part * KEYS
    q = gl.allocate_shared_memory(gl.bfloat16, [64, 512], LAYOUT)
    k = gl.allocate_shared_memory(gl.bfloat16, [KEYS, 512], LAYOUT)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, ROPE], LAYOUT) if ROPE else q
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [KEYS, ROPE], LAYOUT) if ROPE else k
    at = gl.arange(0, KEYS, gl.SliceLayout(1, L))
    read = READ(keys, token, first, at)
    column = gl.arange(0, 512, gl.SliceLayout(0, L))
    tail = 512 + gl.arange(0, 64, gl.SliceLayout(0, L))
    # What lies behind the last head stays as it is: results of such rows are not used.
    head = head_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
    q_at = q_ptr + ((token * HEADS + head).to(gl.int64) * WIDTH)[:, None]
    live = (head < HEADS)[:, None]
    if ROPE:
        async_copy.async_copy_global_to_shared(q_rope, q_at + tail[None, :], mask=live)
    async_copy.async_copy_global_to_shared(q, q_at + column[None, :], mask=live)
    if (head_tile == 0) & (part == 0):
        counter = gl.arange(0, ARRIVALS, gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(arrivals_ptr + token * ARRIVALS + counter, gl.zeros_like(counter))
    stop = COUNT(keys, read)
    if part // EACH * 64 < stop:
        from_ptr = ADDRESSES(keys, ROWS(keys, read, first, stop, at))[:, None]
        if ROPE:
            async_copy.async_copy_global_to_shared(k_rope, from_ptr + tail[None, :])
        async_copy.async_copy_global_to_shared(k, from_ptr + column[None, :])
        async_copy.commit_group()
        async_copy.wait_group(0)
        thread_barrier()
        fence_async_shared()
        zeros = gl.zeros([64, KEYS], gl.float32, SCORES)
        if ROPE:
            sums = warpgroup_mma(q_rope, k_rope.permute((1, 0)), zeros, use_acc=False, is_async=True)
            sums = warpgroup_mma(q, k.permute((1, 0)), sums, is_async=True)
        else:
            sums = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[sums])
        row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        key = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        scores = gl.where((first + key)[None, :] < stop, scores, MASKED)
        # At least a sum of no keys, so that a masked key weighs nothing where all are.
        top = gl.maximum(top_of(scores, scale_log2), NO_KEYS)
        weights = weights_of_scores(scores, scale_log2, top)
        slot = tile_slot(token, head_tile, part // EACH, key_tiles, HEADS)
        to = slot * 4096 + row[:, None] * 64 + (part % EACH * KEYS + key)[None, :]
        gl.store(weights_ptr + to, weights.to(gl.bfloat16))
        of_keys = (slot * EACH + part % EACH) * 64 + row
        gl.store(tops_ptr + of_keys, top)
        gl.store(sums_ptr + of_keys, sum_of_tile(weights) if KEYS == 64 else gl.sum(weights, 1))
