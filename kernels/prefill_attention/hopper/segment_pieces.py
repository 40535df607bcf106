"""Which piece of work a persistent program computes next, and the key tiles that it needs.

A piece is a tile of the work list with all of its keys, or one segment of a tile's keys: which of the two a launch has
is said by the list. The producer draws the next piece from a counter, one ahead, and writes it to the work queue in
shared memory, where the others read it, some numbers only when they are done with the keys: the queue has room for two
pieces. A negative head says that none is left.

    unit     seq, first query, first token, queries of the sequence, keys of the sequence, segment, segments of all
             tiles before this one (for one head), number of the tile
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.work_queue import read_number
from kernels.prefill_attention.hopper.tiles import record


@gluon.jit
def piece(records_ptr, units_ptr, split, place, num_items, HEADS: gl.constexpr):
    """(head, seq, first query, first token, queries, keys, segment, segments before, number of the tile) of a piece.

    The segment of a tile that is computed whole is -1.
    """
    place = gl.maximum(gl.minimum(place, num_items - 1), 0)
    segment = place * 0 - 1
    before = place * 0
    number = place * 0
    if split:
        head = place % HEADS
        at_ptr = units_ptr + place // HEADS * 8
        seq, first, token = gl.load(at_ptr), gl.load(at_ptr + 1), gl.load(at_ptr + 2)
        q_len, kv_len = gl.load(at_ptr + 3), gl.load(at_ptr + 4)
        segment = gl.load(at_ptr + 5)
        before = gl.load(at_ptr + 6)
        number = gl.load(at_ptr + 7)
    else:
        head, seq, first, token, q_len, kv_len = record(records_ptr, place, num_items, HEADS)
    return head, seq, first, token, q_len, kv_len, segment, before, number


@gluon.jit
def read_piece(queue, turn):
    """(kv head, first query, queries of the sequence, its keys, segment or -1) of a turn's piece, in four warps."""
    slot = (turn & 1) * 8
    head = read_number(queue, slot, 4)
    first = read_number(queue, slot + 1, 4)
    q_len = read_number(queue, slot + 3, 4)
    return head, first, q_len, read_number(queue, slot + 4, 4), read_number(queue, slot + 5, 4)


@gluon.jit
def piece_keys(first, q_len, kv_len, segment, QUERIES: gl.constexpr, BN: gl.constexpr, SEGMENT: gl.constexpr):
    """(first key tile, tile behind the last one) of a piece; segment -1, SEGMENT 0: of all keys that the tile sees."""
    start = first * 0
    stop = (gl.minimum(kv_len, kv_len - q_len + first + QUERIES) + BN - 1) // BN
    if SEGMENT > 0 and segment >= 0:
        start = segment * (SEGMENT // BN)
        stop = gl.minimum(stop, start + SEGMENT // BN)
    return start, stop
