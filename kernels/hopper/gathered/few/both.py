"""Weights and values of a launch of few rows with short lists: one program for some heads of a query and 64 columns.

Each program makes the weights of its heads anew, as many as there are parts of columns. Up to a few hundred keys that
takes less time than a launch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.gathered.few.columns import gather_columns, write_columns
from kernels.hopper.gathered.few.tiles import tile_slot
from kernels.hopper.gathered.items import share_with, sinks_of
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.softmax.triton import MASKED, NO_KEYS


@gluon.jit
def weigh_and_attend(
    keys, scratch, results, scale_log2, key_tiles,
    READ: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, ADDRESSES: gl.constexpr,
    PIECE: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Writes 64 columns of GROUP heads, of lists of one piece. Called by four warps for 8 heads, by eight for 16."""
    allow_next_launch()
    WARPS: gl.constexpr = GROUP // 2
    TILES: gl.constexpr = PIECE // 64
    BLOCK: gl.constexpr = 16 * WARPS  # rows of a block of scores: GROUP heads of a tile, then of the next
    STACK: gl.constexpr = BLOCK // GROUP
    STEPS: gl.constexpr = (TILES + STACK - 1) // STACK
    ROOM: gl.constexpr = 1 << (max(TILES, STACK) - 1).bit_length()
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, WARPS // 4], instr_shape=[16, GROUP // (WARPS // 4), 16]
    )
    HEAD: gl.constexpr = gl.SliceLayout(0, VALUES)
    part = gl.program_id(0) % 8
    group = gl.program_id(0) // 8
    token = gl.program_id(1)
    values = gl.allocate_shared_memory(gl.bfloat16, [TILES, 64, 64], LAYOUT)
    weights = gl.allocate_shared_memory(gl.bfloat16, [STEPS, BLOCK, 64], LAYOUT)
    places = gl.allocate_shared_memory(gl.int32, [ROOM * 64], PLAIN)
    tops = gl.allocate_shared_memory(gl.float32, [ROOM * GROUP], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [ROOM * GROUP], PLAIN)
    at = gl.arange(0, ROOM * 64, FLAT)
    read = READ(keys, token, 0, at)
    sink = sinks_of(results, group * GROUP + gl.arange(0, GROUP, HEAD), HEADS)
    stop = COUNT(keys, read)
    tiles = (stop + 63) // 64
    if tiles > 0:
        gather_columns(keys, values, places, ROWS(keys, read, 0, stop, at), part, tiles, ADDRESSES, WARPS)
        async_copy.commit_group()
        slot = tile_slot(token, group * GROUP // 64, 0, key_tiles, HEADS)
        weigh(scratch, (weights, tops, sums), scale_log2, slot, group * GROUP % 64, tiles, ROOM, STACK, KEYS, WARPS)
        weights_of = weights._reinterpret(gl.bfloat16, [STEPS * STACK, GROUP, 64], LAYOUT)
        tops_of = tops._reinterpret(gl.float32, [ROOM, GROUP], PLAIN)
        sums_of = sums._reinterpret(gl.float32, [ROOM, GROUP], PLAIN)
        acc = gl.zeros([64, GROUP], gl.float32, VALUES)
        row_sum = gl.full([GROUP], 0.0, gl.float32, HEAD)
        async_copy.wait_group(0)
        thread_barrier()
        fence_async_shared()
        top = tops_of.index(0).load(HEAD)
        decay = gl.exp2(NO_KEYS - top)
        for tile in range(tiles):
            rows, shares = values.index(tile).permute((1, 0)), weights_of.index(tile).permute((1, 0))
            added = warpgroup_mma(rows, shares, acc * decay[None, :], is_async=True)
            # While the product is made.
            row_sum = gl.fma(row_sum, decay, sums_of.index(tile).load(HEAD))
            next_top = tops_of.index(gl.minimum(tile + 1, tiles - 1)).load(HEAD)
            decay = gl.exp2(top - next_top)
            top = next_top
            acc = warpgroup_mma_wait(0, deps=[added])
        acc = acc * share_with(results, sink, top, row_sum)[None, :]
        write_columns(results[0], acc, token, part, group, HEADS, GROUP, WARPS)
    else:
        wait_for_last_launch()
        write_columns(results[0], gl.zeros([64, GROUP], gl.float32, VALUES), token, part, group, HEADS, GROUP, WARPS)


@gluon.jit
def weigh(
    scratch, made, scale_log2, slot, inside, tiles, ROOM: gl.constexpr, STACK: gl.constexpr, KEYS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Waits for scores and makes weights of heads `inside` and on, tile by tile, for each tile and head the largest
    score so far, scaled, and their sum, all in shared memory. A step makes as many weights as there are registers."""
    scores_ptr, peaks_ptr, _, _, _, _, _, _, _ = scratch
    weights, tops, sums = made
    BLOCK: gl.constexpr = 16 * WARPS
    GROUP: gl.constexpr = BLOCK // STACK
    EACH: gl.constexpr = 64 // KEYS
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PEAKS: gl.constexpr = gl.BlockedLayout([1, 1], [ROOM, 32 // ROOM], [1, WARPS], [0, 1])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 64, 16])
    SR: gl.constexpr = gl.SliceLayout(1, SCORES)
    row = gl.arange(0, BLOCK, SR)
    key = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    scores_at = scores_ptr + slot * 4096 + (row // GROUP * 4096 + (inside + row % GROUP) * 64)[:, None] + key[None, :]
    tile = gl.arange(0, ROOM, gl.SliceLayout(1, PEAKS))[:, None]
    head = gl.arange(0, GROUP, gl.SliceLayout(0, PEAKS))[None, :]
    peaks_at = peaks_ptr + slot * (64 * EACH) + tile * (64 * EACH) + inside + head
    there = (tile < tiles) & (head < GROUP)
    wait_for_last_launch()
    peaks = gl.load(peaks_at, mask=there, other=NO_KEYS, cache_modifier=".cg")
    for half in gl.static_range(1, EACH):
        peaks = gl.maximum(peaks, gl.load(peaks_at + half * 64, mask=there, other=NO_KEYS, cache_modifier=".cg"))
    block = load_block(scores_at, 0, row // GROUP, key, tiles, STACK)
    peaks = gl.maximum(gl.associative_scan(peaks, 0, larger), NO_KEYS)
    tops._reinterpret(gl.float32, [ROOM, GROUP], TABLE).store(peaks)
    tops_of = tops._reinterpret(gl.float32, [ROOM // STACK, BLOCK], PLAIN)
    sums_of = sums._reinterpret(gl.float32, [ROOM // STACK, BLOCK], PLAIN)
    thread_barrier()
    for step in range((tiles + STACK - 1) // STACK):
        next_block = load_block(scores_at, step + 1, row // GROUP, key, tiles, STACK)
        blank = gl.zeros_like(block)
        part = gl.exp2(gl.fma(block, blank + scale_log2, blank - tops_of.index(step).load(SR)[:, None]))
        weights.index(step).store(part.to(gl.bfloat16))
        sums_of.index(step).store(gl.sum(part, 1))
        block = next_block


@gluon.jit
def load_block(scores_at, step, tile, key, tiles, STACK: gl.constexpr):
    """Returns the scores of a step, of `tile`s behind its first one; where there is no tile they are masked."""
    there = (step * STACK + tile < tiles)[:, None] & (key < 64)[None, :]
    return gl.load(scores_at + step * (STACK * 4096), mask=there, other=MASKED, cache_modifier=".cg")


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)
