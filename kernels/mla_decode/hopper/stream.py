"""The producer warp of mla_decode for Hopper: latents, box by box, and queries into shared memory.

Knows no arithmetic; it runs ahead of the consumers into the next item.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.mailbox.kernel import publish
from kernels.mla_decode.hopper.pieces import planned_item


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
    mailbox,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    LEAF: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTI: gl.constexpr,
    ROWS: gl.constexpr,
):
    _, _, _, left, right, rope = shared[0]
    _, _, left_full, left_empty, right_full, right_empty = bars[0]
    BOX: gl.constexpr = PAGE if PAGE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    tables_ptr = plan[4]
    items = gl.load(plan[1])
    step = 0
    turn = 0
    index = gl.program_id(0)
    while index < items:
        seq, q_start, q_len, tile, leaf, leaves, length, part = planned_item(plan, index, HEADS, LEAF, MULTI)
        publish(mailbox[0], mailbox[1], mailbox[2], turn, (q_start, q_len, tile, leaf, leaves, length, part))
        q_row = q_start * HEADS + tile * ROWS
        row_ptr = tables_ptr + seq.to(gl.int64) * stride_tables_seq
        last = gl.maximum((length - 1) // PAGE, 0)
        first = leaf * LEAF
        stop = gl.minimum(length, first + leaves * LEAF)
        rows = box_rows(row_ptr, first, last, page_rows, PAGE, BOX, BOXES)
        for key in range(first, stop, TILE):
            s = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(left_empty.index(s), phase)
            mbarrier.expect(left_full.index(s), TILE * 320 * 2)
            for j in gl.static_range(BOXES):
                tma.async_copy_global_to_shared(
                    rope_desc, [rows[j], 512], left_full.index(s), rope.index(s).slice(j * BOX, BOX, 0)
                )
                tma.async_copy_global_to_shared(
                    half_desc, [rows[j], 0], left_full.index(s), left.index(s).slice(j * BOX, BOX, 0)
                )
            mbarrier.wait(right_empty.index(s), phase)
            mbarrier.expect(right_full.index(s), TILE * 256 * 2)
            for j in gl.static_range(BOXES):
                tma.async_copy_global_to_shared(
                    half_desc, [rows[j], 256], right_full.index(s), right.index(s).slice(j * BOX, BOX, 0)
                )
            if key == first:
                # Behind the first latents: these have room before the last item's queries are done with.
                load_queries(q_half_desc, q_rope_desc, q_row, turn, shared[0], bars[0], ROWS)
            # Read behind this tile's copies, while there is no room for the next.
            rows = box_rows(row_ptr, key + TILE, last, page_rows, PAGE, BOX, BOXES)
            step += 1
        if first >= stop:
            load_queries(q_half_desc, q_rope_desc, q_row, turn, shared[0], bars[0], ROWS)
        turn += 1
        index += gl.num_programs(0)
    publish(mailbox[0], mailbox[1], mailbox[2], turn, (0, 0, 0, 0, -1, 0, 0))


@gluon.jit
def load_queries(q_half_desc, q_rope_desc, row, turn, tiles, bars, ROWS: gl.constexpr):
    """A tile of queries, once the last one is done with."""
    q_left, q_right, q_rope, _, _, _ = tiles
    q_full, q_empty, _, _, _, _ = bars
    mbarrier.wait(q_empty, (turn & 1) ^ 1)
    mbarrier.expect(q_full, ROWS * 576 * 2)
    tma.async_copy_global_to_shared(q_half_desc, [row, 0], q_full, q_left)
    tma.async_copy_global_to_shared(q_half_desc, [row, 256], q_full, q_right)
    tma.async_copy_global_to_shared(q_rope_desc, [row, 512], q_full, q_rope)


@gluon.jit
def box_rows(row_ptr, key, last, page_rows, PAGE: gl.constexpr, BOX: gl.constexpr, COUNT: gl.constexpr):
    """First rows of a tile's boxes, read ahead of their use; past the end any of the sequence's, which are masked."""
    a = box_row(row_ptr, key, last, page_rows, PAGE)
    if COUNT == 1:
        return (a, a, a, a, a, a, a, a)
    b = box_row(row_ptr, key + BOX, last, page_rows, PAGE)
    if COUNT == 2:
        return (a, b, a, b, a, b, a, b)
    c = box_row(row_ptr, key + 2 * BOX, last, page_rows, PAGE)
    d = box_row(row_ptr, key + 3 * BOX, last, page_rows, PAGE)
    if COUNT == 4:
        return (a, b, c, d, a, b, c, d)
    e = box_row(row_ptr, key + 4 * BOX, last, page_rows, PAGE)
    f = box_row(row_ptr, key + 5 * BOX, last, page_rows, PAGE)
    g = box_row(row_ptr, key + 6 * BOX, last, page_rows, PAGE)
    h = box_row(row_ptr, key + 7 * BOX, last, page_rows, PAGE)
    return (a, b, c, d, e, f, g, h)


@gluon.jit
def box_row(row_ptr, key, last, page_rows, PAGE: gl.constexpr):
    """The row of the pool where the box with this key begins."""
    return gl.load(row_ptr + gl.minimum(key // PAGE, last)) * page_rows + key % PAGE
