"""mla_decode in Gluon for Hopper where sequences are few, second launch: softmax and values of a leaf.

The programs of a leaf's 64 rows compute the same weights, and each its own columns of the values.

    producer       copies a tile's scores and columns, these a page's rows at a time
    consumer       weights from the scores, values
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import release_read, thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.hopper.registers import opaque
from kernels.mla_decode.hopper.leaves import clear_tail, part_at
from kernels.mla_decode.hopper.scores import masked, weighed
from kernels.mla_decode.hopper.stream import box_rows, copy_boxes
from kernels.mla_decode.hopper.tile_scores import scores_of
from kernels.softmax.triton import LN_2, NO_KEYS


@gluon.jit
def stream_columns(
    scores_desc,
    columns_desc,
    plan,
    page_rows,
    stride_tables_seq,
    shared,
    bars,
    PAGE: gl.constexpr,
    LEAF: gl.constexpr,
    TILE: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    items_ptr, counts_ptr, tables_ptr = plan
    scores, values = shared
    full, empty = bars
    BLOCKS: gl.constexpr = 512 // COLUMNS
    BOX: gl.constexpr = PAGE if PAGE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    step = 0
    wait_for_last_launch()
    for index in range(gl.program_id(0), gl.load(counts_ptr) * BLOCKS, gl.num_programs(0)):
        at = items_ptr + index // BLOCKS * 8
        first = gl.load(at + 4) * LEAF
        stop = gl.minimum(gl.load(at + 6), first + LEAF)
        row_ptr = tables_ptr + gl.load(at).to(gl.int64) * stride_tables_seq
        rows = box_rows(row_ptr, first, stop, page_rows, PAGE, BOX, BOXES)
        for key in range(first, stop, TILE):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), TILE * (COLUMNS * 2 + 256))
            piece = index // BLOCKS * (LEAF // TILE) + (key - first) // TILE
            tma.async_copy_global_to_shared(scores_desc, [piece * 128, 0], full.index(s), scores.index(s))
            copy_boxes(columns_desc, index % BLOCKS * COLUMNS, rows, full.index(s), values.index(s), BOX, BOXES)
            # Read behind this tile's copies, while there is no room for the next.
            rows = box_rows(row_ptr, key + TILE, stop, page_rows, PAGE, BOX, BOXES)
            step += 1


@gluon.jit
def weigh_columns(
    results,
    plan,
    scale_log2,
    num_tokens,
    shared,
    bars,
    HEADS: gl.constexpr,
    LEAF: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    items_ptr, counts_ptr, _tables_ptr = plan
    scores, values = shared
    full, empty = bars
    BLOCKS: gl.constexpr = 512 // COLUMNS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=VALUES, k_width=2)
    SR: gl.constexpr = gl.SliceLayout(1, SCORES)
    OR: gl.constexpr = gl.SliceLayout(1, VALUES)
    step = 0
    for index in range(gl.program_id(0), gl.load(counts_ptr) * BLOCKS, gl.num_programs(0)):
        at = items_ptr + index // BLOCKS * 8
        start = gl.load(at + 4) * LEAF
        length = gl.load(at + 6)
        last_seen = length - 1 + gl.arange(0, 64, SR) * 0
        # Above every masked score, so that the weight of one is 0 even in a row that has seen no key yet.
        row_max = gl.full([64], NO_KEYS, gl.float32, SR)
        row_sum = gl.full([64], 0.0, gl.float32, SR)
        acc = gl.zeros([64, COLUMNS], gl.float32, VALUES)
        for first in range(start, gl.minimum(length, start + LEAF), TILE):
            s = step % STAGES
            mbarrier.wait(full.index(s), (step // STAGES) & 1)
            part = masked(scores_of(scores.index(s), SCORES), first, last_seen, 1, length, TILE, SCORES)
            weights, row_max, decay = weighed(part, row_max, scale_log2)
            row_sum = gl.fma(row_sum, decay, gl.sum(weights, 1))
            acc = acc * gl.convert_layout(decay, OR)[:, None]
            if first + TILE > length:
                clear_tail(values.index(s), length - first, TILE)
            half = gl.convert_layout(weights.to(gl.bfloat16), P)
            product = warpgroup_mma(half, values.index(s), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[product])
            # All have read the scores before any thread arrives.
            thread_barrier()
            release_read(empty.index(s))
            step += 1
        sums = (acc, row_max, row_sum)
        store_columns(results, sums, at, index % BLOCKS, num_tokens, HEADS, COLUMNS, SLOT_ROWS, WANTS_LSE, VALUES)


@gluon.jit
def store_columns(
    results,
    sums,
    at,
    block,
    num_tokens,
    HEADS: gl.constexpr,
    COLUMNS: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
    VALUES: gl.constexpr,
):
    """Stores a block of columns of an item: as a part at its slot, or as outputs; its first block the rows' sums."""
    out_ptr, lse_ptr, acc_ptr, row_max_ptr, row_sum_ptr = results
    OR: gl.constexpr = gl.SliceLayout(1, VALUES)
    acc, row_max, row_sum = sums
    row_max, row_sum = gl.convert_layout(row_max, OR), gl.convert_layout(row_sum, OR)
    tile = gl.load(at + 3)
    slot = gl.load(at + 7)
    row = opaque(gl.arange(0, 64, OR))
    dim = block * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, VALUES))
    live = row < HEADS - tile * 64
    if slot >= 0:
        to = slot.to(gl.int64) * SLOT_ROWS
        gl.store(acc_ptr + to * 512 + part_at(row, dim, SLOT_ROWS), acc, mask=live[:, None])
        gl.store(row_max_ptr + to + row, row_max, mask=live & (block == 0))
        gl.store(row_sum_ptr + to + row, row_sum, mask=live & (block == 0))
    else:
        q_start = gl.load(at + 1)
        to = (q_start * HEADS + tile * 64).to(gl.int64)
        result = (acc * (1.0 / gl.where(row_sum == 0.0, 1.0, row_sum))[:, None]).to(gl.bfloat16)
        gl.store(out_ptr + (to + row)[:, None] * 512 + dim[None, :], result, mask=live[:, None])
        if WANTS_LSE:
            lse = gl.where(row_sum == 0.0, float("-inf"), (row_max + gl.log2(row_sum)) * LN_2)
            lse_at = (tile * 64 + row).to(gl.int64) * num_tokens + q_start
            gl.store(lse_ptr + lse_at, lse, mask=live & (block == 0))


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_tokens", "stride_tables_seq"])
def weigh_values(
    scores_desc,
    columns_desc,
    out_ptr,
    lse_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    items_ptr,
    counts_ptr,
    tables_ptr,
    scale_log2,
    num_tokens,
    page_rows,
    stride_tables_seq,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    LEAF: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    FLOATS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    scores = gl.allocate_shared_memory(gl.float32, [STAGES, 128, 32], FLOATS)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, COLUMNS], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    # The fold waits for what this launch stores.
    allow_next_launch()
    plan = (items_ptr, counts_ptr, tables_ptr)
    results = (out_ptr, lse_ptr, acc_ptr, row_max_ptr, row_sum_ptr)
    shared = (scores, values)
    bars = (full, empty)
    # fmt: off
    gl.warp_specialize(
        [
            (weigh_columns, (results, plan, scale_log2, num_tokens, shared, bars,
                             HEADS, LEAF, TILE, STAGES, COLUMNS, SLOT_ROWS, WANTS_LSE)),
            (stream_columns, (scores_desc, columns_desc, plan, page_rows, stride_tables_seq, shared, bars,
                              PAGE, LEAF, TILE, COLUMNS, STAGES)),
        ],
        [1],
        [40],
    )
    # fmt: on
