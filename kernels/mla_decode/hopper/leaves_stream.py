"""The producer warp of mla_decode by leaves: latents, box by box, and queries into shared memory.

It runs ahead of the consumers into the next item. The rotary part of a tile has barriers of its own: it is free once
the scores are there, long before the values are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.work_queue import draw, leave, publish
from kernels.mla_decode.hopper.leaves import leaf_tiles, planned_item
from kernels.mla_decode.hopper.stream import box_rows, copy_boxes, load_queries


@gluon.jit
def stream_leaves(
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
    LEAF: gl.constexpr,
    SHORT: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    q_left, q_right, q_rope, left, right, rope = shared[0]
    _, _, left_full, left_empty, right_full, right_empty = bars[0]
    rope_full, rope_empty = bars[1]
    tiles = (q_left.index(0), q_right.index(0), q_rope.index(0), left, right, rope)
    BOX: gl.constexpr = PAGE if PAGE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    step = 0
    turn = 0
    index = gl.program_id(0)
    while index < gl.load(plan[1]):
        seq, q_start, q_len, tile, leaf, leaves, length, part = planned_item(plan[0], index)
        publish(work[0], work[1], work[2], turn, (q_start, q_len, tile, leaf, leaves, length, part))
        q_row = q_start * HEADS + tile * 64
        row_ptr = plan[2] + seq.to(gl.int64) * stride_tables_seq
        per_leaf = leaf_tiles(length, LEAF, SHORT, TILE, True) * TILE
        first = leaf * per_leaf
        stop = gl.minimum(length, first + leaves * per_leaf)
        if turn == 0:
            # While the block table is read.
            load_queries(q_half_desc, q_rope_desc, q_row, turn, tiles, bars[0], 64)
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
                load_queries(q_half_desc, q_rope_desc, q_row, turn, tiles, bars[0], 64)
            # Read behind this tile's copies, while there is no room for the next.
            rows = box_rows(row_ptr, key + TILE, stop, page_rows, PAGE, BOX, BOXES)
            step += 1
        if (first >= stop) & (turn > 0):
            load_queries(q_half_desc, q_rope_desc, q_row, turn, tiles, bars[0], 64)
        turn += 1
        index = draw(plan[3], gl.num_programs(0))
    leave(plan[3], gl.num_programs(0))
    publish(work[0], work[1], work[2], turn, (0, 0, 0, 0, -1, 0, 0))
