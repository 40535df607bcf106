"""Which tile of the work list a persistent program computes next, and the key tiles that it needs.

The producer draws the next tile from a counter, one tile ahead, and writes its record to the work queue in shared
memory, where the others read it. A negative head says that none is left.

Where tiles are few, each is two items, one for each half of its rows: one consumer computes it, the other gives its
key tiles back. So twice as many multiprocessors have work. A program then has one item, or none.

    count    tiles of the list without heads, tiles drawn beyond each program's first one, programs that are done
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.work_queue import read_number


@gluon.jit
def record(records_ptr, place, num_items, HEADS: gl.constexpr):
    """(kv head, seq, first query, first token, queries of the sequence, keys of the sequence) of the tile at a place.

    A run of records, tiles of one sequence and of much the same cost, comes head by head: what runs at the same time
    then reads the same keys. Behind the last place it is some tile that exists, so that loading ahead is safe.
    """
    place = gl.maximum(gl.minimum(place, num_items - 1), 0)
    near = place // HEADS
    start = gl.maximum(gl.minimum(gl.load(records_ptr + near * 8 + 5), near), 0)
    run = gl.maximum(gl.minimum(gl.load(records_ptr + near * 8 + 6), num_items // HEADS - start), 1)
    within = place - start * HEADS
    at = records_ptr + (start + within % run) * 8
    return within // run, gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def item_at(
    place, records_ptr, count_ptr, HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, HALVES: gl.constexpr
):  # fmt: skip
    """Returns which half of its tile's rows the item at a place is, then the tile's record; -1 is all rows, 2 no item.

    Tiles are halved if HALVES is set and no program would get two halves. Up to 64 / GQA_GROUP new tokens leave a half
    without rows, which is no item: its program ends, as no other could be its next.
    """
    num_tiles = gl.load(count_ptr) * HEADS
    halved = 0
    if HALVES:
        halved = (2 * num_tiles <= gl.num_programs(0)).to(gl.int32)
    half = gl.where(place >= (num_tiles << halved), 2, gl.where(halved != 0, place & 1, -1))
    head, seq, first, token, q_len, kv_len = record(records_ptr, place >> halved, num_tiles, HEADS)
    if HALVES:
        half = gl.where((half == 1) & (first + 64 // GQA_GROUP >= q_len), 2, half)
    return half, head, seq, first, token, q_len, kv_len


@gluon.jit
def read_tile(queue, HALVES: gl.constexpr):
    """(kv head, first query, first token, queries of the sequence, keys of the sequence, half of the rows or -1 for
    all), in four warps."""
    head = read_number(queue, 0, 4)
    first = read_number(queue, 1, 4)
    token = read_number(queue, 2, 4)
    half = head * 0 - 1
    if HALVES:
        half = read_number(queue, 5, 4)
    return head, first, token, read_number(queue, 3, 4), read_number(queue, 4, 4), half


@gluon.jit
def key_tiles(first, half, q_len, kv_len, GQA_GROUP: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr):
    """(first key that a row of the tile sees, first key tile, tile behind the last one that it, or its half, needs)."""
    QUERIES: gl.constexpr = 128 // GQA_GROUP
    cached = kv_len - q_len
    end = first + gl.where(half == 0, 63 // GQA_GROUP + 1, QUERIES)
    lowest = 0
    if WINDOW > 0:
        # Whose tiles have no halves.
        lowest = gl.maximum(cached + first - WINDOW + 1, 0)
    stop = gl.minimum(kv_len, cached + end)
    return lowest, lowest // BN, (stop + BN - 1) // BN
