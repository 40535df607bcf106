"""The producer warp of mla_decode for Hopper: latents, box by box, and queries into shared memory.

It runs ahead of the consumers into the next item.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.work_queue import draw, leave, publish
from kernels.mla_decode.hopper.leaves import leaf_tiles, planned_item


@gluon.jit
def stream(
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
    ROWS: gl.constexpr,
):
    _, _, _, left, right, rope = shared[0]
    _, _, left_full, left_empty, right_full, right_empty = bars[0]
    BOX: gl.constexpr = PAGE if PAGE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    step = 0
    turn = 0
    index = gl.program_id(0)
    while index < gl.load(plan[1]):
        seq, q_start, q_len, tile, leaf, leaves, length, part = planned_item(plan[0], index)
        publish(work[0], work[1], work[2], turn, (q_start, q_len, tile, leaf, leaves, length, part))
        q_row = q_start * HEADS + tile * ROWS
        row_ptr = plan[2] + seq.to(gl.int64) * stride_tables_seq
        per_leaf = leaf_tiles(length, LEAF, SHORT, TILE, False) * TILE
        first = leaf * per_leaf
        stop = gl.minimum(length, first + leaves * per_leaf)
        rows = box_rows(row_ptr, first, stop, page_rows, PAGE, BOX, BOXES)
        for key in range(first, stop, TILE):
            s = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(left_empty.index(s), phase)
            mbarrier.expect(left_full.index(s), TILE * 320 * 2)
            copy_boxes(rope_desc, 512, rows, left_full.index(s), rope.index(s), BOX, BOXES)
            copy_boxes(half_desc, 0, rows, left_full.index(s), left.index(s), BOX, BOXES)
            mbarrier.wait(right_empty.index(s), phase)
            mbarrier.expect(right_full.index(s), TILE * 256 * 2)
            copy_boxes(half_desc, 256, rows, right_full.index(s), right.index(s), BOX, BOXES)
            if key == first:
                # Behind the first latents: these have room before the last item's queries are done with.
                load_queries(q_half_desc, q_rope_desc, q_row, turn, shared[0], bars[0], ROWS)
            # Read behind this tile's copies, while there is no room for the next.
            rows = box_rows(row_ptr, key + TILE, stop, page_rows, PAGE, BOX, BOXES)
            step += 1
        if first >= stop:
            load_queries(q_half_desc, q_rope_desc, q_row, turn, shared[0], bars[0], ROWS)
        turn += 1
        index = draw(plan[3], gl.num_programs(0))
    leave(plan[3], gl.num_programs(0))
    publish(work[0], work[1], work[2], turn, (0, 0, 0, 0, -1, 0, 0))


@gluon.jit
def copy_boxes(desc, column, rows, full, tile, BOX: gl.constexpr, BOXES: gl.constexpr):
    """Copies some columns of a tile."""
    for j in gl.static_range(BOXES):
        lane = gl.arange(0, rows[0].shape[0], gl.BlockedLayout([1], [32], [1], [0]))
        row = gl.sum(gl.where(lane == j % 2, rows[j // 2], 0), 0)
        tma.async_copy_global_to_shared(desc, [row, column], full, tile.slice(j * BOX, BOX, 0))


@gluon.jit
def load_queries(q_half_desc, q_rope_desc, row, turn, tiles, bars, ROWS: gl.constexpr):
    """A tile of queries, once the last one is done with."""
    q_left, q_right, q_rope, _, _, _ = tiles
    q_full, q_empty, _, _, _, _ = bars
    mbarrier.wait(q_empty, (turn & 1) ^ 1)
    ask_queries(q_half_desc, q_rope_desc, row, q_full, (q_left, q_right, q_rope), ROWS)


@gluon.jit
def ask_queries(q_half_desc, q_rope_desc, row, q_full, tiles, ROWS: gl.constexpr):
    """A tile of queries, where no other one is in use."""
    q_left, q_right, q_rope = tiles
    mbarrier.expect(q_full, ROWS * 576 * 2)
    tma.async_copy_global_to_shared(q_half_desc, [row, 0], q_full, q_left)
    tma.async_copy_global_to_shared(q_half_desc, [row, 256], q_full, q_right)
    tma.async_copy_global_to_shared(q_rope_desc, [row, 512], q_full, q_rope)


@gluon.jit
def box_rows(row_ptr, key, stop, page_rows, PAGE: gl.constexpr, BOX: gl.constexpr, COUNT: gl.constexpr):
    """First rows of a tile's boxes, read ahead of their use: two in a register, for the even lanes and the odd.

    Past the end they are of the sequence's last page, and masked.
    """
    LANES: gl.constexpr = 1 if COUNT == 1 else 2
    keys = key + BOX * gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))
    a = first_rows(row_ptr, keys, stop, page_rows, PAGE)
    if COUNT <= 2:
        return (a, a, a, a)
    b = first_rows(row_ptr, keys + 2 * BOX, stop, page_rows, PAGE)
    if COUNT == 4:
        return (a, b, a, b)
    c = first_rows(row_ptr, keys + 4 * BOX, stop, page_rows, PAGE)
    d = first_rows(row_ptr, keys + 6 * BOX, stop, page_rows, PAGE)
    return (a, b, c, d)


@gluon.jit
def first_rows(row_ptr, keys, stop, page_rows, PAGE: gl.constexpr):
    """The rows of the pool where boxes with these keys begin."""
    return gl.load(row_ptr + gl.minimum(keys, stop - 1) // PAGE) * page_rows + keys % PAGE
