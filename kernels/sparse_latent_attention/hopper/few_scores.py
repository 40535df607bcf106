"""Scores of a launch of few rows: one program for a tile of 64 chosen latents and 64 heads of a query."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.softmax.triton import MASKED
from kernels.sparse_latent_attention.hopper.few_tiles import positions_from, tile_of, tile_slot


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["stride_tables_seq"], do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"])
def score_tiles(
    q_ptr, pages_ptr, tables_ptr, sequences_ptr, num_keys_ptr, chosen_ptr, scores_ptr, peaks_ptr, arrivals_ptr,
    scale_log2, page_rows, stride_tables_seq,
    K: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr, ARRIVALS: gl.constexpr,
):  # fmt: skip
    """Writes scores [64, 64] and each head's maximum, scaled; clears the ARRIVALS counters of a query."""
    # In this order: the next launches read what the rows are before they wait.
    wait_for_last_launch()
    allow_next_launch()
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Eight threads for 128 bytes of a row, four rows of a warp.
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    token, head_tile, key_tile = tile_of(gl.program_id(0), K, HEADS)
    first = key_tile * 64
    q_left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], LAYOUT)
    left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    right = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], LAYOUT)
    stop = gl.minimum(gl.load(num_keys_ptr + token), K)
    # A row that sees no key may be of no sequence.
    sequence = gl.maximum(gl.load(sequences_ptr + token), 0)
    at = first + gl.arange(0, 64, gl.SliceLayout(1, L))
    position = positions_from(chosen_ptr + token.to(gl.int64) * K, at, first, stop, K)
    half = gl.arange(0, 256, gl.SliceLayout(0, L))
    tail = gl.arange(0, 64, gl.SliceLayout(0, L))
    # What lies behind the last head stays as it is: results of such rows are not used.
    head = head_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
    q_at = q_ptr + ((token * HEADS + head).to(gl.int64) * 576)[:, None]
    live = (head < HEADS)[:, None]
    async_copy.async_copy_global_to_shared(q_rope, q_at + (512 + tail)[None, :], mask=live)
    async_copy.async_copy_global_to_shared(q_left, q_at + half[None, :], mask=live)
    if (head_tile == 0) & (key_tile == 0):
        counter = gl.arange(0, ARRIVALS, gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(arrivals_ptr + token * ARRIVALS + counter, gl.zeros_like(counter))
    if first < stop:
        table_ptr = tables_ptr + sequence.to(gl.int64) * stride_tables_seq
        rows = gl.load(table_ptr + position // PAGE) * page_rows + position % PAGE
        latents = pages_ptr + (rows.to(gl.int64) * 576)[:, None]
        async_copy.async_copy_global_to_shared(rope, latents + (512 + tail)[None, :])
        async_copy.async_copy_global_to_shared(left, latents + half[None, :])
        async_copy.commit_group()
        async_copy.async_copy_global_to_shared(q_right, q_at + (256 + half)[None, :], mask=live)
        async_copy.async_copy_global_to_shared(right, latents + (256 + half)[None, :])
        async_copy.commit_group()
        async_copy.wait_group(1)
        thread_barrier()
        fence_async_shared()
        zeros = gl.zeros([64, 64], gl.float32, SCORES)
        part = warpgroup_mma(q_rope, rope.permute((1, 0)), zeros, use_acc=False, is_async=True)
        part = warpgroup_mma(q_left, left.permute((1, 0)), part, is_async=True)
        async_copy.wait_group(0)
        thread_barrier()
        fence_async_shared()
        part = warpgroup_mma(q_right, right.permute((1, 0)), part, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[part])
        row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        column = first + gl.arange(0, 64, gl.SliceLayout(0, SCORES))
        scores = gl.where(column[None, :] < stop, scores, MASKED)
        slot = tile_slot(token, head_tile, key_tile, K, HEADS)
        gl.store(scores_ptr + slot * 4096 + row[:, None] * 64 + (column - first)[None, :], scores)
        gl.store(peaks_ptr + slot * 64 + row, gl.max(scores, 1) * scale_log2)
