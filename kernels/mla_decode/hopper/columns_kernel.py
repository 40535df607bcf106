"""mla_decode in Gluon for Hopper where sequences are few, second launch: values of a leaf.

A program of a leaf's 64 rows has some columns of the values. Weights come by the top of their own tile; by the largest
of the leaf they are the same times a power of two, so all products are one chain that never waits.

    producer       copies a tile's weights and columns, these a page's rows at a time
    consumer       values
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import release_read, thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.hopper.registers import opaque
from kernels.mla_decode.hopper.columns_stream import stream_columns
from kernels.mla_decode.hopper.leaves import clear_tail, leaf_tiles
from kernels.mla_decode.hopper.nodes import store_part
from kernels.mla_decode.hopper.tile_weights import weights_of
from kernels.mla_decode.hopper.whole import level
from kernels.softmax.triton import LN_2, NO_KEYS


@gluon.constexpr_function
def power_of_two(n):
    """Returns the least power of two that is not less."""
    return 1 << (n - 1).bit_length()


@gluon.jit
def bring_together(made, shared, place, count):
    """Returns the largest top of a leaf's tiles for each row; stores the factors that it gives the tiles' weights, and
    sums of weights with them."""
    tops_ptr, tile_sums_ptr = made
    _, _, factors, sums = shared
    TABLE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, 2], [1, 0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PER_LEAF: gl.constexpr = factors.shape[0]
    number = gl.arange(0, PER_LEAF, gl.SliceLayout(1, TABLE))[:, None]
    row = gl.arange(0, 64, gl.SliceLayout(0, TABLE))[None, :]
    at = (place + number) * 64 + row
    there = (number < count) & (row < 64)
    tops = gl.load(tops_ptr + at, mask=there, other=NO_KEYS, cache_modifier=".cg")
    some = gl.load(tile_sums_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
    top = gl.maximum(gl.max(tops, 0), NO_KEYS)
    factor = gl.exp2(tops - top[None, :])
    # All are done with those of the last item.
    thread_barrier()
    factors._reinterpret(gl.float32, [PER_LEAF, 64], ROWS).store(factor)
    sums._reinterpret(gl.float32, [PER_LEAF, 64], ROWS).store(some * factor)
    thread_barrier()
    return top


@gluon.jit
def copied(half):
    """Returns 16-bit numbers in registers of their own, which are written behind all waits before."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [half], dtype=half.dtype, is_pure=False, pack=2)


@gluon.jit
def weigh_columns(
    results,
    made,
    plan,
    num_tokens,
    shared,
    bars,
    HEADS: gl.constexpr,
    LEAF: gl.constexpr,
    SHORT: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    items_ptr, counts_ptr, _tables_ptr = plan
    weights, values, factors, sums = shared
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
    wait_for_last_launch()
    for index in range(gl.program_id(0), gl.load(counts_ptr) * BLOCKS, gl.num_programs(0)):
        at = items_ptr + index // BLOCKS * 8
        length = gl.load(at + 6)
        per_leaf = leaf_tiles(length, LEAF, SHORT, TILE, True) * TILE
        start = gl.load(at + 4) * per_leaf
        count = (gl.minimum(length - start, per_leaf) + TILE - 1) // TILE
        top = bring_together(made, shared, index // BLOCKS * (LEAF // TILE), count)
        base = gl.convert_layout(top, OR)
        row_sum = gl.full([64], 0.0, gl.float32, OR)
        acc = gl.zeros([64, COLUMNS], gl.float32, VALUES)
        for number in range(count):
            s = step % STAGES
            mbarrier.wait(full.index(s), (step // STAGES) & 1)
            half = weights_of(weights.index(s), SCORES)
            half = half * factors.index(number).load(SR).to(gl.bfloat16)[:, None]
            row_sum = row_sum + sums.index(number).load(OR)
            if start + (number + 1) * TILE > length:
                clear_tail(values.index(s), length - start - number * TILE, TILE)
            acc = warpgroup_mma_wait(0, deps=[acc])
            # Other registers than those that the last product read until here.
            half = copied(half)
            product = warpgroup_mma(gl.convert_layout(half, P), values.index(s), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[product])  # on its way
            if number > 0:
                # The last tile's product is done, and all have read its weights.
                thread_barrier()
                release_read(empty.index((step + STAGES - 1) % STAGES))
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()
        if count > 0:
            release_read(empty.index((step + STAGES - 1) % STAGES))
        store_columns(
            results, (acc, base, row_sum), at, index % BLOCKS, num_tokens, HEADS, COLUMNS, SLOT_ROWS, WANTS_LSE, VALUES
        )


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
    out_ptr, lse_ptr, parts_ptr, row_max_ptr, row_sum_ptr = results
    OR: gl.constexpr = gl.SliceLayout(1, VALUES)
    acc, row_max, row_sum = sums
    tile = gl.load(at + 3)
    slot = gl.load(at + 7)
    row = opaque(gl.arange(0, 64, OR))
    dim = block * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, VALUES))
    live = row < HEADS - tile * 64
    if slot >= 0:
        to = slot.to(gl.int64) * SLOT_ROWS
        part_ptr = parts_ptr + to * 512 + block * (COLUMNS * SLOT_ROWS)
        store_part(part_ptr, acc, HEADS - tile * 64, SLOT_ROWS)
        gl.store(row_max_ptr + to + row, row_max, mask=live & (block == 0))
        gl.store(row_sum_ptr + to + row, row_sum, mask=live & (block == 0))
    else:
        q_start = gl.load(at + 1)
        to = (q_start * HEADS + tile * 64).to(gl.int64)
        result = (acc * (1.0 / gl.where(row_sum == 0.0, 1.0, row_sum))[:, None]).to(gl.bfloat16)
        gl.store(out_ptr + (to + row)[:, None] * 512 + dim[None, :], result, mask=live[:, None])
        if WANTS_LSE:
            lse = level(row_max, row_sum) * LN_2
            lse_at = (tile * 64 + row).to(gl.int64) * num_tokens + q_start
            gl.store(lse_ptr + lse_at, lse, mask=live & (block == 0))


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_tokens", "stride_tables_seq"])
def sum_columns(
    weights_desc,
    columns_desc,
    out_ptr,
    lse_ptr,
    parts_ptr,
    row_max_ptr,
    row_sum_ptr,
    tops_ptr,
    tile_sums_ptr,
    items_ptr,
    counts_ptr,
    tables_ptr,
    num_tokens,
    page_rows,
    stride_tables_seq,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    LEAF: gl.constexpr,
    SHORT: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, TILE], LAYOUT)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, COLUMNS], LAYOUT)
    factors = gl.allocate_shared_memory(gl.float32, [power_of_two(LEAF // TILE), 64], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [power_of_two(LEAF // TILE), 64], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    # The fold waits for what this launch stores.
    allow_next_launch()
    plan = (items_ptr, counts_ptr, tables_ptr)
    results = (out_ptr, lse_ptr, parts_ptr, row_max_ptr, row_sum_ptr)
    shared = (weights, values, factors, sums)
    bars = (full, empty)
    # fmt: off
    gl.warp_specialize(
        [
            (weigh_columns, (results, (tops_ptr, tile_sums_ptr), plan, num_tokens, shared, bars,
                             HEADS, LEAF, SHORT, TILE, STAGES, COLUMNS, SLOT_ROWS, WANTS_LSE)),
            (stream_columns, (weights_desc, columns_desc, plan, page_rows, stride_tables_seq, shared, bars,
                              PAGE, LEAF, SHORT, TILE, COLUMNS, STAGES)),
        ],
        [1],
        [40],
    )
    # fmt: on
