"""mla_decode in Gluon for Hopper where sequences are few, first launch: weights of all heads, tile by tile of latents.

A program takes a tile of latents at a time, so one sequence keeps as many programs busy as it has tiles. Queries stay
while its tiles are of one sequence.

    producer       copies the latents, a page's rows at a time, and the queries
    consumer       scores = q . latent over all 576 dimensions, 64 rows at a time; weights by the tile's own top, that
                   and their sums to memory
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.gathered.weights import top_of, weights_of_scores
from kernels.hopper.launches import allow_next_launch
from kernels.mla_decode.hopper.leaves import leaf_tiles
from kernels.mla_decode.hopper.stream import box_rows, copy_boxes
from kernels.mla_decode.hopper.tile_weights import store_weights
from kernels.softmax.triton import MASKED


@gluon.jit
def tile_of(items_ptr, index, most, TILES: gl.constexpr, LEAF: gl.constexpr, SHORT: gl.constexpr, TILE: gl.constexpr):
    """Returns the first item of a leaf of a sequence, and what it says of the tile of latents with this index.

    That is the sequence, its query, the tile's number in the leaf and first latent, and where the leaf ends. `most` is
    how many tiles a leaf of the batch has at most.
    """
    item = index // most * TILES
    number = index % most
    at = items_ptr + item * 8
    length = gl.load(at + 6)
    per_leaf = leaf_tiles(length, LEAF, SHORT, TILE, True)
    first = gl.load(at + 4) * per_leaf
    stop = gl.minimum(length, (first + per_leaf) * TILE)
    return item, gl.load(at), gl.load(at + 1), number, (first + number) * TILE, stop


@gluon.jit
def stream_tiles(
    q_half_desc,
    q_rope_desc,
    half_desc,
    rope_desc,
    plan,
    page_rows,
    stride_tables_seq,
    shared,
    bars,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    LEAF: gl.constexpr,
    SHORT: gl.constexpr,
    TILE: gl.constexpr,
):
    items_ptr, counts_ptr, tables_ptr = plan
    q_left, q_right, q_rope, left, right, rope = shared
    q_full, q_empty, full, empty = bars
    TILES: gl.constexpr = q_left.shape[0]
    STAGES: gl.constexpr = left.shape[0]
    BOX: gl.constexpr = PAGE if PAGE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    step = 0
    turn = 0
    held = -1
    most = gl.load(counts_ptr + 3)
    for index in range(gl.program_id(0), gl.load(counts_ptr) // TILES * most, gl.num_programs(0)):
        _item, seq, q_start, _number, first, stop = tile_of(items_ptr, index, most, TILES, LEAF, SHORT, TILE)
        if first < stop:
            if seq != held:
                mbarrier.wait(q_empty, (turn & 1) ^ 1)
                mbarrier.expect(q_full, TILES * 64 * 576 * 2)
                for tile in gl.static_range(TILES):
                    row = q_start * HEADS + tile * 64
                    tma.async_copy_global_to_shared(q_rope_desc, [row, 512], q_full, q_rope.index(tile))
                    tma.async_copy_global_to_shared(q_half_desc, [row, 0], q_full, q_left.index(tile))
                    tma.async_copy_global_to_shared(q_half_desc, [row, 256], q_full, q_right.index(tile))
                held = seq
                turn += 1
            row_ptr = tables_ptr + seq.to(gl.int64) * stride_tables_seq
            rows = box_rows(row_ptr, first, stop, page_rows, PAGE, BOX, BOXES)
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), TILE * 576 * 2)
            copy_boxes(rope_desc, 512, rows, full.index(s), rope.index(s), BOX, BOXES)
            copy_boxes(half_desc, 0, rows, full.index(s), left.index(s), BOX, BOXES)
            copy_boxes(half_desc, 256, rows, full.index(s), right.index(s), BOX, BOXES)
            step += 1


@gluon.jit
def weigh_tiles(made, scale_log2, plan, shared, bars, LEAF: gl.constexpr, SHORT: gl.constexpr, TILE: gl.constexpr):
    weights_ptr, tops_ptr, tile_sums_ptr = made
    items_ptr, counts_ptr, _tables_ptr = plan
    q_left, q_right, q_rope, left, right, rope = shared
    q_full, q_empty, full, empty = bars
    TILES: gl.constexpr = q_left.shape[0]
    STAGES: gl.constexpr = left.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    zeros = gl.zeros([64, TILE], gl.float32, SCORES)
    row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    column = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    step = 0
    turn = 0
    held = -1
    most = gl.load(counts_ptr + 3)
    for index in range(gl.program_id(0), gl.load(counts_ptr) // TILES * most, gl.num_programs(0)):
        item, seq, _q_start, number, first, stop = tile_of(items_ptr, index, most, TILES, LEAF, SHORT, TILE)
        if first < stop:
            if seq != held:
                if turn > 0:
                    mbarrier.arrive(q_empty, count=1)
                mbarrier.wait(q_full, turn & 1)
                held = seq
                turn += 1
            s = step % STAGES
            mbarrier.wait(full.index(s), (step // STAGES) & 1)
            for tile in range(TILES):
                part = warpgroup_mma(
                    q_rope.index(tile), rope.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                part = warpgroup_mma(q_left.index(tile), left.index(s).permute((1, 0)), part, is_async=True)
                part = warpgroup_mma(q_right.index(tile), right.index(s).permute((1, 0)), part, is_async=True)
                scores = warpgroup_mma_wait(0, deps=[part])
                if tile == TILES - 1:
                    mbarrier.arrive(empty.index(s), count=1)
                if first + TILE > stop:
                    scores = gl.where((first + column)[None, :] < stop, scores, MASKED)
                top = top_of(scores, scale_log2)
                weights = weights_of_scores(scores, scale_log2, top)
                place = (item + tile) * (LEAF // TILE) + number
                store_weights(weights_ptr, place, weights.to(gl.bfloat16))
                gl.store(tops_ptr + place * 64 + row, top)
                gl.store(tile_sums_ptr + place * 64 + row, gl.sum(weights, 1))
            step += 1


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["stride_tables_seq"])
def weigh_latents(
    q_half_desc,
    q_rope_desc,
    half_desc,
    rope_desc,
    weights_ptr,
    tops_ptr,
    tile_sums_ptr,
    items_ptr,
    counts_ptr,
    tables_ptr,
    scale_log2,
    page_rows,
    stride_tables_seq,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    LEAF: gl.constexpr,
    SHORT: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    TILES: gl.constexpr = (HEADS + 63) // 64
    q_left = gl.allocate_shared_memory(gl.bfloat16, [TILES, 64, 256], LAYOUT)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [TILES, 64, 256], LAYOUT)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [TILES, 64, 64], LAYOUT)
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 64], LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    # The second launch waits for what this one stores.
    allow_next_launch()
    plan = (items_ptr, counts_ptr, tables_ptr)
    made = (weights_ptr, tops_ptr, tile_sums_ptr)
    shared = (q_left, q_right, q_rope, left, right, rope)
    bars = (q_full, q_empty, full, empty)
    # fmt: off
    gl.warp_specialize(
        [
            (weigh_tiles, (made, scale_log2, plan, shared, bars, LEAF, SHORT, TILE)),
            (stream_tiles, (q_half_desc, q_rope_desc, half_desc, rope_desc, plan, page_rows, stride_tables_seq,
                            shared, bars, HEADS, PAGE, LEAF, SHORT, TILE)),
        ],
        [1],
        [56],
    )
    # fmt: on
