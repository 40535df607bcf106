"""The producer warp of mla_decode's second launch for few sequences: a tile's weights, and columns of its latents.

The first latents are on their way before the first launch has ended, which makes the weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.launches import wait_for_last_launch
from kernels.mla_decode.hopper.leaves import leaf_tiles
from kernels.mla_decode.hopper.stream import box_rows, copy_boxes


@gluon.jit
def stream_columns(
    weights_desc,
    columns_desc,
    plan,
    page_rows,
    stride_tables_seq,
    shared,
    bars,
    PAGE: gl.constexpr,
    LEAF: gl.constexpr,
    SHORT: gl.constexpr,
    TILE: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    items_ptr, counts_ptr, tables_ptr = plan
    weights, values, _, _ = shared
    full, empty = bars
    BLOCKS: gl.constexpr = 512 // COLUMNS
    BOX: gl.constexpr = PAGE if PAGE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    step = 0
    for index in range(gl.program_id(0), gl.load(counts_ptr) * BLOCKS, gl.num_programs(0)):
        at = items_ptr + index // BLOCKS * 8
        length = gl.load(at + 6)
        per_leaf = leaf_tiles(length, LEAF, SHORT, TILE, True) * TILE
        first = gl.load(at + 4) * per_leaf
        stop = gl.minimum(length, first + per_leaf)
        row_ptr = tables_ptr + gl.load(at).to(gl.int64) * stride_tables_seq
        rows = box_rows(row_ptr, first, stop, page_rows, PAGE, BOX, BOXES)
        ahead = 0
        if step == 0:
            # Latents were there before the weights' launch began.
            for key in range(first, gl.minimum(stop, first + STAGES * TILE), TILE):
                s = (key - first) // TILE
                mbarrier.expect(full.index(s), TILE * (COLUMNS + TILE) * 2)
                copy_boxes(columns_desc, index % BLOCKS * COLUMNS, rows, full.index(s), values.index(s), BOX, BOXES)
                rows = box_rows(row_ptr, key + TILE, stop, page_rows, PAGE, BOX, BOXES)
            ahead = STAGES
            wait_for_last_launch()
        for key in range(first, stop, TILE):
            s = step % STAGES
            number = (key - first) // TILE
            if number >= ahead:
                mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(s), TILE * (COLUMNS + TILE) * 2)
                copy_boxes(columns_desc, index % BLOCKS * COLUMNS, rows, full.index(s), values.index(s), BOX, BOXES)
                # Read behind this tile's copies, while there is no room for the next.
                rows = box_rows(row_ptr, key + TILE, stop, page_rows, PAGE, BOX, BOXES)
            piece = index // BLOCKS * (LEAF // TILE) + number
            tma.async_copy_global_to_shared(weights_desc, [piece * 64, 0], full.index(s), weights.index(s))
            step += 1
    wait_for_last_launch()
