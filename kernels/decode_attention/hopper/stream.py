"""The producers: one warp copies tiles of K, another tiles of V, page by page, into a ring in shared memory.

A stream never stops at the end of a split: the next tiles are already on their way while the consumer works.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.decode_attention.hopper.places import leave_place
from kernels.decode_attention.hopper.splits import lowest_key, query_span, read_split
from kernels.hopper.work_queue import draw, leave, publish_index, take_index


@gluon.jit
def page_ids(row_ptr, first, last, COUNT: gl.constexpr):
    """Ids of a tile's pages, of which there may be fewer than COUNT: any valid id will do in place of the others."""
    a = gl.load(row_ptr + gl.minimum(first, last))
    if COUNT == 1:
        return a, a, a, a
    b = gl.load(row_ptr + gl.minimum(first + 1, last))
    if COUNT == 2:
        return a, b, a, b
    c = gl.load(row_ptr + gl.minimum(first + 2, last))
    d = gl.load(row_ptr + gl.minimum(first + 3, last))
    return a, b, c, d


@gluon.jit
def copy_tile(
    desc, slot, ready, ids, head, key, page_rows, PAGE: gl.constexpr, TILE: gl.constexpr, BY_HEAD: gl.constexpr
):
    """One box of rows for each page, or one slice of a page that is larger than a tile."""
    D: gl.constexpr = slot.shape[1]
    BOX: gl.constexpr = TILE if PAGE > TILE else PAGE
    mbarrier.expect(ready, TILE * D * (slot.dtype.primitive_bitwidth // 8))
    for i in gl.static_range(TILE // BOX):
        row = ids[i] * page_rows
        if PAGE > TILE:
            row += key % PAGE
        column = head * D
        if BY_HEAD:
            row += head * PAGE
            column = 0
        tma.async_copy_global_to_shared(desc, [row, column], ready, slot.slice(i * BOX, BOX, 0))


@gluon.jit
def following_split(work_ptr, queue, queue_full, queue_empty, turn, DRAWS: gl.constexpr):
    """The program's next split: drawn and published, or taken."""
    if DRAWS:
        split = draw(work_ptr, gl.num_programs(0))
        publish_index(queue, queue_full, queue_empty, turn, split)
    else:
        split = take_index(queue, queue_full, queue_empty, turn, 1)
    return split


@gluon.jit
def stream_pages(
    desc,
    page_rows,
    ring,
    full,
    empty,
    queue,
    queue_full,
    queue_empty,
    tables_ptr,
    stride_tables_seq,
    cu_seqlens_ptr,
    token_first,
    splits_ptr,
    work_ptr,
    place,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    LEAF: gl.constexpr,
    TOKENS: gl.constexpr,
    HAS_SPANS: gl.constexpr,
    WINDOW: gl.constexpr,
    BY_HEAD: gl.constexpr,
    PLACED: gl.constexpr,
    DRAWS: gl.constexpr,
):
    """All tiles of this program's splits; the partition that DRAWS also fetches the program's further splits."""
    STAGES: gl.constexpr = ring.shape[0]
    PAGES: gl.constexpr = TILE // PAGE if PAGE < TILE else 1
    tile = 0
    turn = 0
    split = place
    own, num_splits = read_split(splits_ptr, split)
    more = num_splits > gl.num_programs(0)
    # The next split's numbers are asked for early, and by who only takes them once they are published.
    ASKS_AFTER: gl.constexpr = 1 if DRAWS else 2
    while split < num_splits:
        seq, head, leaf, leaves, length, _, _ = own
        split = num_splits
        issued = 0
        row_ptr = tables_ptr + seq.to(gl.int64) * stride_tables_seq
        last = gl.maximum((length - 1) // PAGE, 0)
        low = 0
        if WINDOW > 0:
            _, tokens, _ = query_span(cu_seqlens_ptr, seq, token_first, TOKENS, HAS_SPANS)
            low = lowest_key(length - tokens + token_first, length, WINDOW) // TILE * TILE
        key = gl.maximum(leaf * LEAF, low)
        stop = gl.minimum(length, (leaf + leaves) * LEAF)
        ids = page_ids(row_ptr, key // PAGE, last, PAGES)
        while key < stop:
            ids_next = page_ids(row_ptr, (key + TILE) // PAGE, last, PAGES)
            at = tile % STAGES
            mbarrier.wait(empty.index(at), ((tile // STAGES) & 1) ^ 1)
            copy_tile(desc, ring.index(at), full.index(at), ids, head, key, page_rows, PAGE, TILE, BY_HEAD)
            ids = ids_next
            key += TILE
            tile += 1
            issued += 1
            if more & (issued == ASKS_AFTER):
                split = following_split(work_ptr, queue, queue_full, queue_empty, turn, DRAWS)
                own, _ = read_split(splits_ptr, gl.minimum(split, num_splits - 1))
        if more & (issued < ASKS_AFTER):
            split = following_split(work_ptr, queue, queue_full, queue_empty, turn, DRAWS)
            own, _ = read_split(splits_ptr, gl.minimum(split, num_splits - 1))
        turn += 1
    if DRAWS:
        if PLACED:
            leave_place(work_ptr)
        elif more:
            leave(work_ptr, gl.num_programs(0))
