"""The producer warp of mla_decode cut by load: latents, box by box, and queries into shared memory.

Its program's items lie one behind the other in the plan. The rotary part of a tile has barriers of its own: it is free
once the scores are there, long before the values are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.launches import wait_for_last_launch
from kernels.hopper.work_queue import publish
from kernels.mla_decode.hopper.leaves import planned_item
from kernels.mla_decode.hopper.stream import box_rows, copy_boxes, load_queries


@gluon.jit
def stream_runs(
    q_half_desc,
    q_rope_desc,
    half_desc,
    rope_desc,
    plan,
    page_rows,
    stride_tables_seq,
    shared,
    bars,
    work,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
):
    items_ptr, firsts_ptr, tables_ptr = plan
    q_left, q_right, q_rope, left, right, rope = shared[0]
    _, _, left_full, left_empty, right_full, right_empty = bars[0]
    rope_full, rope_empty = bars[1]
    BOX: gl.constexpr = PAGE if PAGE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    tiles = (q_left.index(0), q_right.index(0), q_rope.index(0), left, right, rope)
    step = 0
    turn = 0
    # It may have written what is read here and behind, and read what is written.
    wait_for_last_launch()
    index = gl.load(firsts_ptr + gl.program_id(0))
    stop_index = gl.load(firsts_ptr + gl.program_id(0) + 1)
    # Where each program has one item, it is read without waiting for its index.
    item = planned_item(items_ptr, gl.program_id(0))
    if index != gl.program_id(0):
        item = planned_item(items_ptr, index)
    while index < stop_index:
        seq, q_start, q_len, tile, first, stop, length, slot = item
        publish(work[0], work[1], work[2], turn, (q_start, q_len, tile, first, stop, length, slot))
        q_row = q_start * HEADS + tile * ROWS
        row_ptr = tables_ptr + seq.to(gl.int64) * stride_tables_seq
        if turn == 0:
            # While the block table is read.
            load_queries(q_half_desc, q_rope_desc, q_row, turn, tiles, bars[0], ROWS)
        rows = box_rows(row_ptr, first, stop, page_rows, PAGE, BOX, BOXES)
        for key in range(first, stop, TILE):
            s = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(rope_empty.index(s), phase)
            mbarrier.expect(rope_full.index(s), TILE * 64 * 2)
            copy_boxes(rope_desc, 512, rows, rope_full.index(s), rope.index(s), BOX, BOXES)
            mbarrier.wait(left_empty.index(s), phase)
            mbarrier.expect(left_full.index(s), TILE * 256 * 2)
            copy_boxes(half_desc, 0, rows, left_full.index(s), left.index(s), BOX, BOXES)
            mbarrier.wait(right_empty.index(s), phase)
            mbarrier.expect(right_full.index(s), TILE * 256 * 2)
            copy_boxes(half_desc, 256, rows, right_full.index(s), right.index(s), BOX, BOXES)
            if (key == first) & (turn > 0):
                # Behind the first latents: these have room before the last item's queries are done with.
                load_queries(q_half_desc, q_rope_desc, q_row, turn, tiles, bars[0], ROWS)
            # Read behind this tile's copies, while there is no room for the next.
            rows = box_rows(row_ptr, key + TILE, stop, page_rows, PAGE, BOX, BOXES)
            step += 1
        if (first >= stop) & (turn > 0):
            load_queries(q_half_desc, q_rope_desc, q_row, turn, tiles, bars[0], ROWS)
        turn += 1
        index += 1
        item = planned_item(items_ptr, gl.minimum(index, stop_index - 1))
    publish(work[0], work[1], work[2], turn, (0, 0, 0, 0, -1, 0, 0))
