"""Values of a launch of few rows: one program for some heads of a query, 64 of their columns and a piece.

Keys are the rows of the products, so that a program may have any number of heads. What does not depend on weights is
read before they are there.
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

# Weights arrive in as many batches of tiles: the first products begin before the last weights are there.
BATCHES = gl.constexpr(4)


@gluon.jit
def attend_columns(
    keys, scratch, results, key_tiles, pieces,
    READ: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, ADDRESSES: gl.constexpr,
    PIECE: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, ARRIVALS: gl.constexpr,
):  # fmt: skip
    """Writes 64 columns of GROUP heads; of several pieces the program that comes last folds all, in their order."""
    allow_next_launch()
    _, _, weights_ptr, decays_ptr, sums_ptr, tops_ptr, acc_ptr, row_sum_ptr, arrivals_ptr = scratch
    GROUPS: gl.constexpr = (HEADS + GROUP - 1) // GROUP
    TILES: gl.constexpr = PIECE // 64
    BLOCK: gl.constexpr = 1 << (TILES - 1).bit_length()
    BATCH: gl.constexpr = (TILES + BATCHES - 1) // BATCHES
    # Of more than 32 heads two batches have room at a time: the next one comes where one was used.
    AHEAD: gl.constexpr = BATCHES if GROUP <= 32 else 2
    ROOM: gl.constexpr = TILES if GROUP <= 32 else AHEAD * BATCH
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, GROUP, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, VALUES)
    part = gl.program_id(0) % 8
    group = gl.program_id(0) // 8
    token = gl.program_id(1)
    piece = gl.program_id(2)
    head_tile = group * GROUP // 64
    inside = group * GROUP % 64  # the first head in its tile
    begin = piece * PIECE
    values = gl.allocate_shared_memory(gl.bfloat16, [TILES, 64, 64], LAYOUT)
    weights = gl.allocate_shared_memory(gl.bfloat16, [ROOM, GROUP, 64], LAYOUT)
    places = gl.allocate_shared_memory(gl.int32, [BLOCK * 64], PLAIN)
    decays = gl.allocate_shared_memory(gl.float32, [BLOCK * GROUP], PLAIN)
    parts = gl.allocate_shared_memory(gl.float32, [BLOCK * GROUP], PLAIN)
    at = gl.arange(0, BLOCK * 64, FLAT)
    head = gl.arange(0, GROUP, HEAD)
    read = READ(keys, token, begin, at)
    sink = sinks_of(results, group * GROUP + head, HEADS)
    stop = COUNT(keys, read)
    tiles = (gl.minimum(begin + PIECE, stop) - begin + 63) // 64
    if tiles > 0:
        gather_columns(keys, values, places, ROWS(keys, read, begin, stop, at), part, tiles, ADDRESSES, 4)
        wait_for_last_launch()
        slot = tile_slot(token, head_tile, piece * TILES, key_tiles, HEADS)
        row = gl.arange(0, GROUP, gl.SliceLayout(1, L))
        key = gl.arange(0, 64, gl.SliceLayout(0, L))
        from_ptr = weights_ptr + slot * 4096 + (inside + row)[:, None] * 64 + key[None, :]
        for batch in gl.static_range(AHEAD):
            load_weights(weights, from_ptr, batch * BATCH, gl.minimum(batch * BATCH + BATCH, tiles), ROOM, TILES)
        factor = gl.arange(0, BLOCK * GROUP, FLAT)
        factor_at = slot * 64 + factor // GROUP * 64 + inside + factor % GROUP
        there = factor // GROUP < tiles
        decays.store(gl.load(decays_ptr + factor_at, mask=there, other=0.0, cache_modifier=".cg"))
        parts.store(gl.load(sums_ptr + factor_at, mask=there, other=0.0, cache_modifier=".cg"))
        top = gl.load(tops_ptr + (slot + tiles - 1) * 64 + inside + head, cache_modifier=".cg")
        decays_of = decays._reinterpret(gl.float32, [BLOCK, GROUP], PLAIN)
        parts_of = parts._reinterpret(gl.float32, [BLOCK, GROUP], PLAIN)
        acc = gl.zeros([64, GROUP], gl.float32, VALUES)
        row_sum = gl.full([GROUP], 0.0, gl.float32, HEAD)
        thread_barrier()
        decay = decays_of.index(0).load(HEAD)
        for batch in gl.static_range(BATCHES):
            async_copy.wait_group(min(AHEAD - 1, BATCHES - 1 - batch))
            thread_barrier()
            fence_async_shared()
            for tile in range(batch * BATCH, gl.minimum(batch * BATCH + BATCH, tiles)):
                rows, shares = (
                    values.index(tile).permute((1, 0)),
                    weights_of(weights, tile, ROOM, TILES).permute((1, 0)),
                )
                added = warpgroup_mma(rows, shares, acc * decay[None, :], is_async=True)
                # While the product is made.
                row_sum = gl.fma(row_sum, decay, parts_of.index(tile).load(HEAD))
                decay = decays_of.index(gl.minimum(tile + 1, TILES - 1)).load(HEAD)
                acc = warpgroup_mma_wait(0, deps=[added])
            if batch + AHEAD < BATCHES:
                thread_barrier()
                begin_tile = (batch + AHEAD) * BATCH
                load_weights(weights, from_ptr, begin_tile, gl.minimum(begin_tile + BATCH, tiles), ROOM, TILES)
        if stop <= PIECE:
            acc = acc * share_with(results, sink, top, row_sum)[None, :]
            write_columns(results[0], acc, token, part, group, HEADS, GROUP, 4)
        else:
            tops = tops_ptr + tile_slot(token, head_tile, 0, key_tiles, HEADS) * 64 + inside
            live = (stop + PIECE - 1) // PIECE
            unit = (token * GROUPS + group) * 8 + part
            sums = acc_ptr + unit.to(gl.int64) * pieces * (64 * GROUP)
            totals = row_sum_ptr + unit.to(gl.int64) * pieces * GROUP
            gl.store(sums + piece * (64 * GROUP) + sums_at(VALUES, GROUP), acc)
            gl.store(totals + piece * GROUP + head, row_sum)
            thread_barrier()
            counter = arrivals_ptr + token * ARRIVALS + group * 8 + part
            if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == live - 1:
                thread_barrier()
                acc, row_sum, top = fold_columns(sums, totals, tops, live, stop, PIECE, GROUP, VALUES)
                acc = acc * share_with(results, sink, top, row_sum)[None, :]
                write_columns(results[0], acc, token, part, group, HEADS, GROUP, 4)
    elif (stop <= 0) & (piece == 0):
        # Each query has a program that waits, so this launch does not end before the last one has.
        wait_for_last_launch()
        write_columns(results[0], gl.zeros([64, GROUP], gl.float32, VALUES), token, part, group, HEADS, GROUP, 4)


@gluon.jit
def weights_of(weights, tile, ROOM: gl.constexpr, TILES: gl.constexpr):
    """Returns where a tile's weights lie in shared memory."""
    place = tile
    if ROOM < TILES:
        place = tile % ROOM
    return weights.index(place)


@gluon.jit
def load_weights(weights, from_ptr, begin, end, ROOM: gl.constexpr, TILES: gl.constexpr):
    """Begins to copy a batch of tiles' weights."""
    for tile in range(begin, end):
        async_copy.async_copy_global_to_shared(weights_of(weights, tile, ROOM, TILES), from_ptr + tile * 4096)
    async_copy.commit_group()


@gluon.jit
def sums_at(VALUES: gl.constexpr, GROUP: gl.constexpr):
    """Returns the offsets of a program's partial sums: two neighbouring heads of a column, then the next column."""
    column = gl.arange(0, 64, gl.SliceLayout(1, VALUES))[:, None]
    head = gl.arange(0, GROUP, gl.SliceLayout(0, VALUES))[None, :]
    return head // 8 * 512 + column * 8 + head % 8


@gluon.jit
def fold_columns(sums, totals, tops, live, stop, PIECE: gl.constexpr, GROUP: gl.constexpr, VALUES: gl.constexpr):
    """Returns the softmax state of `live` pieces, two at least, as `consumers` folds them."""
    HEAD: gl.constexpr = gl.SliceLayout(0, VALUES)
    at = sums_at(VALUES, GROUP)
    head = gl.arange(0, GROUP, HEAD)
    last_tile = (stop + 63) // 64 - 1
    acc = gl.load(sums + at, cache_modifier=".cg")
    row_sum = gl.load(totals + head, cache_modifier=".cg")
    row_max = gl.load(tops + (PIECE - 64) + head, cache_modifier=".cg")
    part = gl.load(sums + 64 * GROUP + at, cache_modifier=".cg")
    for piece in range(1, live):
        part_sum = gl.load(totals + piece * GROUP + head, cache_modifier=".cg")
        tile = gl.minimum((piece + 1) * (PIECE // 64) - 1, last_tile)
        part_max = gl.load(tops + tile * 64 + head, cache_modifier=".cg")
        new_max = gl.maximum(row_max, part_max)
        keep = gl.exp2(row_max - new_max)
        weight = gl.exp2(part_max - new_max)
        acc = gl.fma(acc, gl.zeros_like(acc) + keep[None, :], part * weight[None, :])
        row_sum = gl.fma(row_sum, keep, part_sum * weight)
        row_max = new_max
        if piece + 1 < live:
            part = gl.load(sums + (piece + 1) * (64 * GROUP) + at, cache_modifier=".cg")
    return acc, row_sum, row_max
