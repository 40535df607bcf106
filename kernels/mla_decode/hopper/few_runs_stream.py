"""The producer warp of mla_decode cut by load where heads are few: latents, box by box, and queries into shared memory.

Its program's items lie one behind the other in the plan; parts of a sequence that a program merges come behind its
latents. The rotary part of a tile has barriers of its own: it is free once the scores are there, long before the values
are. Queries have two buffers. The first latents are on their way before the launch before has ended, see few_early.py;
few_pace.py says how many tiles are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.barriers import acquire, fence_async_global
from kernels.hopper.launches import wait_for_last_launch
from kernels.hopper.work_queue import publish
from kernels.mla_decode.hopper.few_early import TILES, ask_first_tile, drop, hand_over, still_so
from kernels.mla_decode.hopper.few_pace import begin_pace, count_tile, end_pace, is_behind
from kernels.mla_decode.hopper.leaves import planned_item
from kernels.mla_decode.hopper.stream import ask_queries, box_rows, copy_boxes, load_queries


@gluon.jit
def stream_few_runs(
    q_half_desc,
    q_rope_desc,
    half_desc,
    rope_desc,
    plan,
    num_seqs,
    page_rows,
    stride_tables_seq,
    shared,
    bars,
    early,
    work,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    EARLY: gl.constexpr,
):
    items_ptr, firsts_ptr, tables_ptr, parts_desc, stored_ptr, counts_ptr, left_ptr = plan
    q_left, q_right, q_rope, left, right, rope = shared[0]
    q_full, q_empty, left_full, left_empty, right_full, right_empty = bars[0]
    rope_full, rope_empty = bars[1]
    BOX: gl.constexpr = PAGE if PAGE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    step = 0
    turn = 0
    if EARLY:
        ready, first_query, seen = ask_first_tile(
            half_desc, rope_desc, plan, num_seqs, page_rows, stride_tables_seq, (left, right, rope), early, PAGE, TILE
        )
    # It may have written what is read here and behind, and read what is written.
    wait_for_last_launch()
    if EARLY and ready > 0:
        queries = (q_left.index(0), q_right.index(0), q_rope.index(0))
        ask_queries(q_half_desc, q_rope_desc, first_query * HEADS, early[0].index(TILES), queries, ROWS)
    index = gl.load(firsts_ptr + gl.program_id(0))
    stop_index = gl.load(firsts_ptr + gl.program_id(0) + 1)
    if EARLY:
        items = gl.load(counts_ptr)
    # Where each program has one item, it is read without waiting for its index.
    item = planned_item(items_ptr, gl.program_id(0))
    if EARLY and ready > 0 and not still_so(seen, index, stop_index):
        drop(early[0], ready)
        ready = 0
    if index != gl.program_id(0):
        item = planned_item(items_ptr, index)
    while index < stop_index:
        seq, q_start, others, part, first, stop, length, slot = item
        publish(work[0], work[1], work[2], turn, (q_start, others, part, first, stop, length, slot))
        row_ptr = tables_ptr + seq.to(gl.int64) * stride_tables_seq
        begin = first
        if EARLY:
            begin += ready * TILE
        rows = box_rows(row_ptr, begin, stop, page_rows, PAGE, BOX, BOXES)
        if EARLY and ready > 0:
            hand_over(early[0], ready, (q_full, left_full, right_full, rope_full))
            step = ready
            ready = 0
        else:
            # Into one of two buffers: the last item's are still in use.
            buffer = turn % 2
            held = (q_left.index(buffer), q_right.index(buffer), q_rope.index(buffer), left, right, rope)
            held_bars = (q_full.index(buffer), q_empty.index(buffer), left_full, left_empty, right_full, right_empty)
            load_queries(q_half_desc, q_rope_desc, q_start * HEADS, turn // 2, held, held_bars, ROWS)
        if EARLY:
            programs, own_left = begin_pace(left_ptr, items, others, (stop - begin + TILE - 1) // TILE)
            all_left = (own_left + 1) * programs
        for key in range(begin, stop, TILE):
            s = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            last = (step + STAGES - 1) % STAGES
            last_phase = ((step + STAGES - 1) // STAGES & 1) ^ 1
            awaits_last = step > 0
            if EARLY:
                awaits_last &= is_behind(own_left, all_left, programs) == 0
            if awaits_last:
                # No more than a tile on its way: with two, programs end further apart, and 64 x 8,192 with 32 heads
                # take 151.7 us for 150.0 (H200). Those that are behind may have two.
                mbarrier.wait(left_full.index(last), last_phase)
            mbarrier.wait(rope_empty.index(s), phase)
            mbarrier.expect(rope_full.index(s), TILE * 64 * 2)
            copy_boxes(rope_desc, 512, rows, rope_full.index(s), rope.index(s), BOX, BOXES)
            mbarrier.wait(left_empty.index(s), phase)
            mbarrier.expect(left_full.index(s), TILE * 256 * 2)
            copy_boxes(half_desc, 0, rows, left_full.index(s), left.index(s), BOX, BOXES)
            if awaits_last:
                mbarrier.wait(right_full.index(last), last_phase)
            mbarrier.wait(right_empty.index(s), phase)
            mbarrier.expect(right_full.index(s), TILE * 256 * 2)
            copy_boxes(half_desc, 256, rows, right_full.index(s), right.index(s), BOX, BOXES)
            # Read behind this tile's copies, while there is no room for the next.
            rows = box_rows(row_ptr, key + TILE, stop, page_rows, PAGE, BOX, BOXES)
            step += 1
            if EARLY:
                own_left -= 1
                all_left = count_tile(left_ptr, programs)
        if EARLY:
            end_pace(left_ptr, programs, own_left)
        if others > 0:  # the program's last item
            await_parts(stored_ptr + slot, others)
        for n in range(others):
            s = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(rope_empty.index(s), phase)
            mbarrier.arrive(rope_full.index(s), count=1)
            copy_part(parts_desc, slot + 1 + n, 0, left, left_full, left_empty, s, phase, TILE)
            copy_part(parts_desc, slot + 1 + n, 256, right, right_full, right_empty, s, phase, TILE)
            step += 1
        turn += 1
        index += 1
        item = planned_item(items_ptr, gl.minimum(index, stop_index - 1))
    publish(work[0], work[1], work[2], turn, (0, 0, 0, 0, -1, 0, 0))


@gluon.jit
def await_parts(counter_ptr, count):
    """Waits until other programs have stored this number of parts, which the copy engine may then read."""
    seen = gl.load(counter_ptr, volatile=True)
    while seen < count:
        seen = gl.load(counter_ptr, volatile=True)
    acquire()
    fence_async_global()
    gl.store(counter_ptr, 0)


@gluon.jit
def copy_part(desc, slot, column, tiles, full, empty, s, phase, TILE: gl.constexpr):
    """Copies 256 columns of a part as a tile of latents; rows that it does not have become 0."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    mbarrier.wait(empty.index(s), phase)
    mbarrier.expect(full.index(s), TILE * 256 * 2)
    tile = tiles.index(s)._reinterpret(gl.bfloat16, [1, TILE, 256], LAYOUT)
    tma.async_copy_global_to_shared(desc, [slot, 0, column], full.index(s), tile)
