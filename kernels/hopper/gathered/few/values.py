"""Values of a launch of few rows: one program for some heads of a query, 64 of their columns and a piece.

Keys are the rows of the products, so that a program may have any number of heads. What does not depend on weights is
read before they are there. Weights come by the top of their own keys; by the piece's they are the same times a power
of two, so all products of a piece are one chain that never waits.
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
from kernels.hopper.gathered.few.columns import finish_columns, gather_columns, write_columns
from kernels.hopper.gathered.few.tiles import tile_slot
from kernels.hopper.gathered.items import sinks_of
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.softmax.triton import NO_KEYS

# Rows of weights, heads of tiles, that are made at once, and bytes up to which those of a piece lie in shared memory
# together; of many heads two batches of tiles take turns.
BATCH_ROWS, MOST_HELD_BYTES = gl.constexpr(128), gl.constexpr(48 << 10)


@gluon.jit
def attend_columns(
    keys, scratch, results, key_tiles, pieces,
    READ: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, ADDRESSES: gl.constexpr,
    PIECE: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr, GROUP: gl.constexpr, ARRIVALS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Writes 64 columns of GROUP heads; of several pieces the program that comes last folds all, in their order."""
    allow_next_launch()
    TILES: gl.constexpr = PIECE // 64
    EACH: gl.constexpr = 64 // KEYS
    BLOCK: gl.constexpr = 1 << (TILES - 1).bit_length()
    BATCH: gl.constexpr = min(BATCH_ROWS // GROUP, BLOCK)
    COUNT_OF_BATCHES: gl.constexpr = (TILES + BATCH - 1) // BATCH
    HELD: gl.constexpr = COUNT_OF_BATCHES if COUNT_OF_BATCHES * BATCH * GROUP * 128 <= MOST_HELD_BYTES else 2
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, WARPS // 4], instr_shape=[16, GROUP // (WARPS // 4), 16]
    )
    HEAD: gl.constexpr = gl.SliceLayout(0, VALUES)
    part = gl.program_id(0) % 8
    group = gl.program_id(0) // 8
    token = gl.program_id(1)
    piece = gl.program_id(2)
    begin = piece * PIECE
    values = gl.allocate_shared_memory(gl.bfloat16, [TILES, 64, 64], LAYOUT)
    weights = gl.allocate_shared_memory(gl.bfloat16, [HELD * BATCH, GROUP, 64], LAYOUT)
    places = gl.allocate_shared_memory(gl.int32, [BLOCK * 64], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [BLOCK * EACH * GROUP], PLAIN)
    tops = gl.allocate_shared_memory(gl.float32, [BATCH * GROUP], PLAIN)
    at = gl.arange(0, BLOCK * 64, FLAT)
    read = READ(keys, token, begin, at)
    sink = sinks_of(results, group * GROUP + gl.arange(0, GROUP, HEAD), HEADS)
    stop = COUNT(keys, read)
    tiles = (gl.minimum(begin + PIECE, stop) - begin + 63) // 64
    if tiles > 0:
        gather_columns(keys, values, places, ROWS(keys, read, begin, stop, at), part, tiles, ADDRESSES, WARPS)
        async_copy.commit_group()
        slot = tile_slot(token, group * GROUP // 64, piece * TILES, key_tiles, HEADS)
        inside = group * GROUP % 64  # the first head in its tile
        wait_for_last_launch()
        batches = read_weights(scratch, slot, inside, tiles, BATCH, COUNT_OF_BATCHES, EACH, GROUP, WARPS)
        read_sums(scratch, (sums, tops), slot, inside, tiles, BLOCK * EACH, BATCH, EACH, GROUP, WARPS)
        thread_barrier()
        sums_of = sums._reinterpret(gl.float32, [BLOCK * EACH, GROUP], PLAIN)
        top = tops._reinterpret(gl.float32, [BATCH, GROUP], PLAIN).index(0).load(HEAD)
        held = weights._reinterpret(gl.bfloat16, [HELD, BATCH * GROUP, 64], LAYOUT)
        acc = gl.zeros([64, GROUP], gl.float32, VALUES)
        async_copy.wait_group(0)
        for batch in gl.static_range(COUNT_OF_BATCHES):
            if batch >= HELD:
                acc = warpgroup_mma_wait(0, deps=[acc])
                thread_barrier()
            place_weights(held.index(batch % HELD), tops, batches[batch], WARPS)
            if HELD < COUNT_OF_BATCHES:
                thread_barrier()
                fence_async_shared()
                acc = add_tiles(
                    acc, values, weights, batch * BATCH, gl.minimum(batch * BATCH + BATCH, tiles), HELD * BATCH
                )
        if HELD == COUNT_OF_BATCHES:
            thread_barrier()
            fence_async_shared()
            acc = add_tiles(acc, values, weights, 0, tiles, HELD * BATCH)
        # While the products are made; there is no weight behind the last tile.
        row_sum = gl.full([GROUP], 0.0, gl.float32, HEAD)
        for tile in gl.static_range(TILES):
            of_tile = sums_of.index(tile * EACH).load(HEAD)
            for i in gl.static_range(1, EACH):
                of_tile += sums_of.index(tile * EACH + i).load(HEAD)
            row_sum += of_tile
        acc = warpgroup_mma_wait(0, deps=[acc])
        finish_columns(
            results, scratch, (acc, row_sum, top), sink, stop, pieces, PIECE, HEADS, GROUP, ARRIVALS, WARPS, VALUES,
        )  # fmt: skip
    elif (stop <= 0) & (piece == 0):
        # Each query has a program that waits, so this launch does not end before the last one has.
        wait_for_last_launch()
        write_columns(results[0], gl.zeros([64, GROUP], gl.float32, VALUES), token, part, group, HEADS, GROUP, WARPS)


@gluon.jit
def add_tiles(acc, values, weights, begin, end, ROOM: gl.constexpr):
    """Returns sums to which tiles are added, on their way."""
    for tile in range(begin, end):
        rows, shares = values.index(tile).permute((1, 0)), weights.index(tile % ROOM).permute((1, 0))
        added = warpgroup_mma(rows, shares, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[added])
    return acc


@gluon.jit
def read_weights(
    scratch, slot, inside, tiles, BATCH: gl.constexpr, COUNT_OF_BATCHES: gl.constexpr, EACH: gl.constexpr,
    GROUP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Returns for each batch weights [rows, 8, 8] and the top of each 8 of them. Rows are heads of a tile, then of the
    next; loads do not wait for each other."""
    weights_ptr, tops_ptr, _, _, _, _ = scratch
    EIGHTS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    OF_EIGHT: gl.constexpr = gl.SliceLayout(2, EIGHTS)
    row = gl.arange(0, BATCH * GROUP, gl.SliceLayout(1, OF_EIGHT))
    eight = gl.arange(0, 8, gl.SliceLayout(0, OF_EIGHT))
    key = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, EIGHTS)))
    tile = row // GROUP
    head = inside + row % GROUP
    tops_at = tops_ptr + slot * (64 * EACH) + (tile * (64 * EACH) + head)[:, None] + (eight * EACH // 8 * 64)[None, :]
    at = weights_ptr + slot * 4096 + (tile * 4096 + head * 64)[:, None] + (eight * 8)[None, :]
    batches = ()
    for batch in gl.static_range(COUNT_OF_BATCHES):
        there = (tile < tiles - batch * BATCH)[:, None] & (eight < 8)[None, :]
        from_ptr = gl.expand_dims(at + batch * (BATCH * 4096), 2) + gl.expand_dims(gl.expand_dims(key, 0), 1)
        every = gl.expand_dims(there, 2) & (gl.expand_dims(gl.expand_dims(key, 0), 1) < 8)
        some = gl.load(from_ptr, mask=every, other=0.0, cache_modifier=".cg")
        top = gl.load(tops_at + batch * (BATCH * 64 * EACH), mask=there, other=NO_KEYS, cache_modifier=".cg")
        batches += ((some, top),)  # type: ignore
    return batches


@gluon.jit
def read_sums(
    scratch, made, slot, inside, tiles, UNITS: gl.constexpr, BATCH: gl.constexpr, EACH: gl.constexpr,
    GROUP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Stores the sums of weights by the piece's top, and that top for each head, BATCH times."""
    _, tops_ptr, sums_ptr, _, _, _ = scratch
    sums, tops = made
    OF_WARP: gl.constexpr = max(GROUP // WARPS, 1)
    TABLE: gl.constexpr = gl.BlockedLayout([1, 1], [32 // OF_WARP, OF_WARP], [1, WARPS], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    unit = gl.arange(0, UNITS, gl.SliceLayout(1, TABLE))[:, None]
    head = gl.arange(0, GROUP, gl.SliceLayout(0, TABLE))[None, :]
    at = slot * (64 * EACH) + unit * 64 + inside + head
    there = (unit < tiles * EACH) & (head < GROUP)
    of_units = gl.load(tops_ptr + at, mask=there, other=NO_KEYS, cache_modifier=".cg")
    some = gl.load(sums_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
    top = gl.maximum(gl.max(of_units, 0), NO_KEYS)
    sums._reinterpret(gl.float32, [UNITS, GROUP], SHARED).store(some * gl.exp2(of_units - top[None, :]))
    same = gl.zeros([BATCH, GROUP], gl.float32, TABLE) + top[None, :]
    tops._reinterpret(gl.float32, [BATCH, GROUP], SHARED).store(same)


@gluon.jit
def place_weights(place, tops, batch, WARPS: gl.constexpr):
    """Stores a batch's weights by the piece's top: times a power of two, so the bits are those of weights made so."""
    some, top = batch
    ROWS: gl.constexpr = some.shape[0]
    OF_EIGHT: gl.constexpr = gl.SliceLayout(2, some.type.layout)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    factor = gl.exp2(top - tops.load(gl.SliceLayout(1, OF_EIGHT))[:, None]).to(gl.bfloat16)
    scaled = some * gl.expand_dims(factor, 2)
    place.store(gl.convert_layout(scaled.reshape([ROWS, 64]), L))
