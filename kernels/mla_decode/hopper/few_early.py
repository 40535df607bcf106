"""The first latents of a program of mla_decode cut by load, few heads, asked for while the launch before still runs.

All latents but a sequence's last one were written before the plan was prepared, and no launch behind that writes them.
What a program goes by, its item and page numbers, may still be written: it is read again behind the wait for the launch
before, and where it was something else, all is asked for again.

    producer    asks for tile 0, waits for the launch before, asks for the first queries, looks at the plan again
    pacer       asks for tile 1 when tile 0 has landed: both at once would keep the queries of a launch that begins on
                an idle card waiting for 19 MB of latents

Tiles and queries arrive at barriers of their own, since a stage's say that what has come is right.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.barriers import thread_barrier

# Tiles asked for early, as many as there are stages; the barrier behind theirs is the queries'.
TILES = gl.constexpr(2)
# What the pacer is told: rows of the tiles' boxes and, at this place, how many tiles.
COUNT_AT = gl.constexpr(31)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def early_buffers():
    """Returns the barriers of what is asked for early, and what the pacer is told, with its barrier."""
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [TILES + 1, 1], BAR)
    told = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for n in gl.static_range(TILES + 1):
        mbarrier.init(full.index(n), count=1)
    mbarrier.init(told_full, count=1)
    return full, told, told_full


@gluon.jit
def ask_first_tile(
    half_desc,
    rope_desc,
    plan,
    num_seqs,
    page_rows,
    stride_tables_seq,
    tiles,
    early,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Asks for the program's first tile of latents, where it does not have a sequence's last one.

    Returns how many tiles are asked for early, the first query's number, and what was gone by. Numbers of an earlier
    plan and any page numbers do no harm: the copy engine reads nothing but the pages.
    """
    items_ptr, firsts_ptr, tables_ptr, _, _, _, _ = plan
    full, told, told_full = early
    BOX: gl.constexpr = PAGE if PAGE < TILE else TILE
    lane = gl.arange(0, 32, LANES)
    # Where each program has one item, it is read without waiting for its index. All of it past the first cache, which
    # would keep what is read here.
    program = gl.program_id(0)
    item_ptrs = items_ptr + program * 8 + lane % 8
    index = gl.load(firsts_ptr + program, volatile=True)
    stop_index = gl.load(firsts_ptr + program + 1, volatile=True)
    item = gl.load(item_ptrs, volatile=True)
    if index != program:
        item_ptrs = items_ptr + index * 8 + lane % 8
        item = gl.load(item_ptrs, volatile=True)
    first, stop, length = number(item, 4), number(item, 5), number(item, 6)
    # A lane for each box, in the block table's bounds whatever the item says.
    key = first + lane * BOX
    column = gl.minimum(gl.maximum(gl.minimum(key, stop - 1), 0) // PAGE, stride_tables_seq - 1)
    seq = gl.minimum(number(item, 0), num_seqs - 1)
    page_ptrs = tables_ptr + seq.to(gl.int64) * stride_tables_seq + column
    pages = gl.load(page_ptrs, volatile=True)
    rows = pages * page_rows + key % PAGE
    count = gl.minimum(gl.maximum(gl.minimum(stop, length - 1) - first, 0) // TILE, TILES)
    count = gl.where(index < stop_index, count, 0)
    if count > 0:
        copy_tile(half_desc, rope_desc, rows, 0, tiles, full, BOX, TILE)
    told.store(gl.where(lane == COUNT_AT, count, rows))
    thread_barrier()
    mbarrier.arrive(told_full, count=1)
    return count, number(item, 1), (index, stop_index, item_ptrs, item, page_ptrs, pages)


@gluon.jit
def ask_second_tile(half_desc, rope_desc, tiles, early, PAGE: gl.constexpr, TILE: gl.constexpr, EARLY: gl.constexpr):
    """The pacer: asks for tile 1 when tile 0 has landed."""
    if EARLY:
        full, told, told_full = early
        mbarrier.wait(told_full, 0)
        rows = told.load(LANES)
        if number(rows, COUNT_AT) > 1:
            mbarrier.wait(full.index(0), 0)
            copy_tile(half_desc, rope_desc, rows, 1, tiles, full, PAGE if PAGE < TILE else TILE, TILE)


@gluon.jit
def still_so(seen, index, stop_index):
    """Returns whether the plan and the block table say now what was gone by early."""
    seen_index, seen_stop, item_ptrs, item, page_ptrs, pages = seen
    changed = (gl.load(item_ptrs, volatile=True) ^ item) | (gl.load(page_ptrs, volatile=True) ^ pages)
    return (gl.max((changed != 0).to(gl.int32), 0) == 0) & (index == seen_index) & (stop_index == seen_stop)


@gluon.jit
def drop(full, count):
    """Waits for what was asked for in vain."""
    for n in range(count):
        mbarrier.wait(full.index(n), 0)
    mbarrier.wait(full.index(TILES), 0)


@gluon.jit
def hand_over(full, count, bars):
    """Says at the stages' barriers that the first queries and `count` tiles are there, when they are."""
    q_full, left_full, right_full, rope_full = bars
    mbarrier.wait(full.index(TILES), 0)
    mbarrier.arrive(q_full.index(0), count=1)
    for n in range(count):
        mbarrier.wait(full.index(n), 0)
        mbarrier.arrive(rope_full.index(n), count=1)
        mbarrier.arrive(left_full.index(n), count=1)
        mbarrier.arrive(right_full.index(n), count=1)


@gluon.jit
def copy_tile(half_desc, rope_desc, rows, n, tiles, full, BOX: gl.constexpr, TILE: gl.constexpr):
    """Copies tile n into stage n; the rows of its boxes lie in neighbouring lanes."""
    left, right, rope = tiles
    mbarrier.expect(full.index(n), TILE * 576 * 2)
    copy_columns(rope_desc, 512, rows, n, full.index(n), rope.index(n), BOX, TILE // BOX)
    copy_columns(half_desc, 0, rows, n, full.index(n), left.index(n), BOX, TILE // BOX)
    copy_columns(half_desc, 256, rows, n, full.index(n), right.index(n), BOX, TILE // BOX)


@gluon.jit
def copy_columns(desc, column, rows, n, full, tile, BOX: gl.constexpr, BOXES: gl.constexpr):
    for j in gl.static_range(BOXES):
        row = number(rows, n * BOXES + j)
        tma.async_copy_global_to_shared(desc, [row, column], full, tile.slice(j * BOX, BOX, 0))


@gluon.jit
def number(numbers, place):
    """Returns one of 32 lanes' numbers."""
    return gl.sum(gl.where(gl.arange(0, 32, LANES) == place, numbers, 0), 0)
