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
from kernels.hopper.gathered.few.columns import finish_piece, gather_columns, write_columns
from kernels.hopper.gathered.few.tiles import tile_slot
from kernels.hopper.gathered.items import sinks_of
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch

# Weights arrive in as many batches of tiles: the first products begin before the last weights are there.
BATCHES = gl.constexpr(4)


@gluon.jit
def attend_columns(
    keys, scratch, results, key_tiles, pieces,
    READ: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, ADDRESSES: gl.constexpr,
    PIECE: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, ARRIVALS: gl.constexpr,
    MANY: gl.constexpr,
):  # fmt: skip
    """Writes 64 columns of GROUP heads; of MANY pieces the program that comes last folds all, in their order."""
    allow_next_launch()
    _, _, weights_ptr, decays_ptr, sums_ptr, tops_ptr, _, _, _, _ = scratch
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
        gather_columns(keys, values, places, ROWS(keys, read, begin, stop, at), tiles, ADDRESSES)
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
        finish_piece(
            scratch, results, (acc, row_sum, top), sink, piece, pieces, stop, PIECE, HEADS, GROUP, ARRIVALS, MANY,
            VALUES,
        )  # fmt: skip
    elif (stop <= 0) & (piece == 0):
        # Each query has a program that waits, so this launch does not end before the last one has.
        wait_for_last_launch()
        write_columns(results[0], gl.zeros([64, GROUP], gl.float32, VALUES), HEADS, GROUP)


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
