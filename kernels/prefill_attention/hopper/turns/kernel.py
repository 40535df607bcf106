"""The turns of a persistent program: which tile of the work list comes next, and the key tiles that it needs.

Knows no page and no query; producer and consumers ask here alike, so nobody has to tell the others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def rounds(count_ptr, HEADS: gl.constexpr):
    """How many tiles this program computes: programs take turns, every other turn in reverse order."""
    total = gl.load(count_ptr) * HEADS
    programs = gl.num_programs(0)
    turns = total // programs
    return turns + (_place(turns) < total).to(gl.int32), total


@gluon.jit
def _place(turn):
    """The tile that this program computes in a turn. Reversing evens out lists that are sorted by length."""
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    return turn * programs + gl.where((turn & 1) == 1, programs - 1 - pid, pid)


@gluon.jit
def record(records_ptr, turn, total, HEADS: gl.constexpr):
    """(kv head, seq, first query, first token, queries of the sequence, keys of the sequence) of a turn's tile."""
    place = gl.maximum(gl.minimum(_place(turn), total - 1), 0)
    at = records_ptr + (place // HEADS) * 8
    return place % HEADS, gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def key_tiles(first, q_len, kv_len, QUERIES: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr):
    """(first key that a row of the tile sees, first key tile, tile behind the last one)."""
    cached = kv_len - q_len
    lowest = 0
    if WINDOW > 0:
        lowest = gl.maximum(cached + first - WINDOW + 1, 0)
    stop = gl.minimum(kv_len, cached + first + QUERIES)
    return lowest, lowest // BN, (stop + BN - 1) // BN
