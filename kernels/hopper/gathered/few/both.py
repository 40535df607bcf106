"""Weights and values of a launch of few rows in one program: for some heads of a query, 64 columns and a piece.

attend_made     four warps that gather values and walk the tiles in order, as weights become ready
make_weights    four warps that make weights from scores, a step of 64 / GROUP tiles after the other

Each program makes the weights of its heads anew, as many times as there are parts of columns. That takes less time than
a launch, as most of it is while earlier tiles are walked.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import make_barriers, thread_barrier
from kernels.hopper.gathered.few.columns import finish_piece, gather_columns, write_columns
from kernels.hopper.gathered.few.tiles import tile_slot
from kernels.hopper.gathered.items import sinks_of
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.softmax.triton import MASKED, NO_KEYS


@gluon.jit
def weigh_and_attend(
    keys, scratch, results, scale_log2, key_tiles, pieces,
    READ: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, ADDRESSES: gl.constexpr,
    PIECE: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr, GROUP: gl.constexpr, ARRIVALS: gl.constexpr,
    MANY: gl.constexpr,
):  # fmt: skip
    """Writes 64 columns of GROUP heads; of MANY pieces the program that comes last folds all. For four warps."""
    allow_next_launch()
    TILES: gl.constexpr = PIECE // 64
    STACK: gl.constexpr = 64 // GROUP
    STEPS: gl.constexpr = (TILES + STACK - 1) // STACK
    ROOM: gl.constexpr = 1 << (max(TILES, STACK) - 1).bit_length()
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    values = gl.allocate_shared_memory(gl.bfloat16, [TILES, 64, 64], LAYOUT)
    weights = gl.allocate_shared_memory(gl.bfloat16, [STEPS, 64, 64], LAYOUT)
    places = gl.allocate_shared_memory(gl.int32, [ROOM * 64], PLAIN)
    tops = gl.allocate_shared_memory(gl.float32, [ROOM * GROUP], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [ROOM * GROUP], PLAIN)
    made = (weights, tops, sums, make_barriers(STEPS, 1))
    gl.warp_specialize(
        [
            (attend_made, (
                keys, scratch, results, values, places, made, pieces, READ, COUNT, ROWS, ADDRESSES, PIECE, HEADS, GROUP,
                ARRIVALS, MANY, ROOM,
            )),
            (make_weights, (
                keys, scratch, made, scale_log2, key_tiles, READ, COUNT, PIECE, HEADS, KEYS, GROUP, ROOM,
            )),
        ],
        [4],
        [120],
    )  # fmt: skip


@gluon.jit
def attend_made(
    keys, scratch, results, values, places, made, pieces,
    READ: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, ADDRESSES: gl.constexpr,
    PIECE: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, ARRIVALS: gl.constexpr, MANY: gl.constexpr,
    ROOM: gl.constexpr,
):  # fmt: skip
    weights, tops, sums, ready = made
    STACK: gl.constexpr = 64 // GROUP
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, GROUP, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, VALUES)
    group = gl.program_id(0) // 8
    token = gl.program_id(1)
    piece = gl.program_id(2)
    begin = piece * PIECE
    at = gl.arange(0, ROOM * 64, FLAT)
    read = READ(keys, token, begin, at)
    sink = sinks_of(results, group * GROUP + gl.arange(0, GROUP, HEAD), HEADS)
    stop = COUNT(keys, read)
    tiles = (gl.minimum(begin + PIECE, stop) - begin + 63) // 64
    if tiles > 0:
        gather_columns(keys, values, places, ROWS(keys, read, begin, stop, at), tiles, ADDRESSES)
        async_copy.commit_group()
        weights_of = weights._reinterpret(gl.bfloat16, [weights.shape[0] * STACK, GROUP, 64], LAYOUT)
        tops_of = tops._reinterpret(gl.float32, [ROOM, GROUP], PLAIN)
        sums_of = sums._reinterpret(gl.float32, [ROOM, GROUP], PLAIN)
        acc = gl.zeros([64, GROUP], gl.float32, VALUES)
        row_sum = gl.full([GROUP], 0.0, gl.float32, HEAD)
        async_copy.wait_group(0)
        thread_barrier()
        wait_for_last_launch()
        mbarrier.wait(ready.index(0), 0)
        # What a tile needs is read while the product before it is made: between products nothing waits for memory.
        last = tiles - 1
        top = tops_of.index(0).load(HEAD)
        next_top = tops_of.index(gl.minimum(1, last)).load(HEAD)
        decay = gl.exp2(NO_KEYS - top)
        # Of the tile before, whose sum has arrived by then.
        added_decay = row_sum
        added_sum = row_sum
        for tile in range(tiles):
            if tile % STACK == 0:
                mbarrier.wait(ready.index(tile // STACK), 0)
            rows, shares = values.index(tile).permute((1, 0)), weights_of.index(tile).permute((1, 0))
            added = warpgroup_mma(rows, shares, acc * decay[None, :], is_async=True)
            row_sum = gl.fma(row_sum, added_decay, added_sum)
            added_decay = decay
            added_sum = sums_of.index(tile).load(HEAD)
            decay = gl.exp2(top - next_top)
            top = next_top
            next_top = tops_of.index(gl.minimum(tile + 2, last)).load(HEAD)
            acc = warpgroup_mma_wait(0, deps=[added])
        row_sum = gl.fma(row_sum, added_decay, added_sum)
        finish_piece(
            scratch, results, (acc, row_sum, top), sink, piece, pieces, stop, PIECE, HEADS, GROUP, ARRIVALS, MANY,
            VALUES,
        )  # fmt: skip
    elif (stop <= 0) & (piece == 0):
        # Each query has a program that waits, so this launch does not end before the last one has.
        wait_for_last_launch()
        write_columns(results[0], gl.zeros([64, GROUP], gl.float32, VALUES), HEADS, GROUP)


@gluon.jit
def make_weights(
    keys, scratch, made, scale_log2, key_tiles,
    READ: gl.constexpr, COUNT: gl.constexpr, PIECE: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr,
    GROUP: gl.constexpr, ROOM: gl.constexpr,
):  # fmt: skip
    """Makes weights, for each tile and head the largest score so far, scaled, and their sum, all in shared memory."""
    scores_ptr, peaks_ptr, _, _, _, _, _, _, _, _ = scratch
    weights, tops, sums, ready = made
    STACK: gl.constexpr = 64 // GROUP
    EACH: gl.constexpr = 64 // KEYS
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PEAKS: gl.constexpr = gl.BlockedLayout([1, 1], [ROOM, 32 // ROOM], [1, 4], [0, 1])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    SR: gl.constexpr = gl.SliceLayout(1, SCORES)
    first_head = gl.program_id(0) // 8 * GROUP
    token = gl.program_id(1)
    begin = gl.program_id(2) * PIECE
    stop = COUNT(keys, READ(keys, token, begin, 0))
    tiles = (gl.minimum(begin + PIECE, stop) - begin + 63) // 64
    if tiles > 0:
        slot = tile_slot(token, first_head // 64, gl.program_id(2) * (PIECE // 64), key_tiles, HEADS)
        inside = first_head % 64
        row = gl.arange(0, 64, SR)
        key = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
        scores_at = (
            scores_ptr + slot * 4096 + (row // GROUP * 4096 + (inside + row % GROUP) * 64)[:, None] + key[None, :]
        )
        tile = gl.arange(0, ROOM, gl.SliceLayout(1, PEAKS))[:, None]
        head = gl.arange(0, GROUP, gl.SliceLayout(0, PEAKS))[None, :]
        peaks_at = peaks_ptr + slot * (64 * EACH) + tile * (64 * EACH) + inside + head
        there = (tile < tiles) & (head < GROUP)
        wait_for_last_launch()
        peaks = gl.load(peaks_at, mask=there, other=NO_KEYS, cache_modifier=".cg")
        for half in gl.static_range(1, EACH):
            peaks = gl.maximum(peaks, gl.load(peaks_at + half * 64, mask=there, other=NO_KEYS, cache_modifier=".cg"))
        # Two steps ahead: one is made in less time than scores are on their way.
        block = load_block(scores_at, 0, row // GROUP, key, tiles, STACK)
        next_block = load_block(scores_at, 1, row // GROUP, key, tiles, STACK)
        peaks = gl.maximum(gl.associative_scan(peaks, 0, larger), NO_KEYS)
        tops._reinterpret(gl.float32, [ROOM, GROUP], TABLE).store(peaks)
        tops_of = tops._reinterpret(gl.float32, [ROOM // STACK, 64], PLAIN)
        sums_of = sums._reinterpret(gl.float32, [ROOM // STACK, 64], PLAIN)
        thread_barrier()
        for step in range((tiles + STACK - 1) // STACK):
            later_block = load_block(scores_at, step + 2, row // GROUP, key, tiles, STACK)
            blank = gl.zeros_like(block)
            part = gl.exp2(gl.fma(block, blank + scale_log2, blank - tops_of.index(step).load(SR)[:, None]))
            weights.index(step).store(part.to(gl.bfloat16))
            sums_of.index(step).store(gl.sum(part, 1))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(ready.index(step), count=1)
            block = next_block
            next_block = later_block


@gluon.jit
def load_block(scores_at, step, tile, key, tiles, STACK: gl.constexpr):
    """Returns the scores of a step, of `tile`s behind its first one; where there is no tile they are masked."""
    there = (step * STACK + tile < tiles)[:, None] & (key < 64)[None, :]
    return gl.load(scores_at + step * (STACK * 4096), mask=there, other=MASKED, cache_modifier=".cg")


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)
