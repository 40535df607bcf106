"""Which tile of the work list a persistent program computes next, and the key tiles that it needs.

The producer draws the next tile from a counter, one tile ahead, and writes its record to the work queue in shared
memory, where the others read it. A negative head says that none is left.

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
def read_tile(queue):
    """(kv head, first query, first token, queries of the sequence, keys of the sequence), in four warps."""
    head = read_number(queue, 0, 4)
    first = read_number(queue, 1, 4)
    token = read_number(queue, 2, 4)
    return head, first, token, read_number(queue, 3, 4), read_number(queue, 4, 4)


@gluon.jit
def key_tiles(first, q_len, kv_len, QUERIES: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr):
    """(first key that a row of the tile sees, first key tile, tile behind the last one)."""
    cached = kv_len - q_len
    lowest = 0
    if WINDOW > 0:
        lowest = gl.maximum(cached + first - WINDOW + 1, 0)
    stop = gl.minimum(kv_len, cached + first + QUERIES)
    return lowest, lowest // BN, (stop + BN - 1) // BN
