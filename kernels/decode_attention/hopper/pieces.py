"""What all partitions of a program agree on: chunks, the pieces of pairs in them, and the keys of a piece.

Knows no tensor of keys or queries. A chunk is a run of units over consecutive pairs (sequence, kv head); the part of a
pair that lies in one chunk is a piece. Streams and consumers walk the same chunks in the same order by themselves.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.decode_attention.hopper.tree import BARRIER


@gluon.jit
def read_chunk(chunks_ptr, chunk):
    """((sequence, kv head, first unit, number of units, length), (chunks, leaves of a unit, units of a chunk))."""
    at = chunks_ptr + chunk * 8
    own = (gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4))
    return own, (gl.load(at + 5), gl.load(at + 6), gl.load(at + 7))


@gluon.jit
def next_pair(seq, head, num_seqs, HEADS: gl.constexpr):
    """The pair after this one; behind the last one it is a pair that exists, so that loading ahead is safe."""
    return gl.minimum(seq + (head + 1) // HEADS, num_seqs - 1), (head + 1) % HEADS


@gluon.jit
def query_span(cu_seqlens_ptr, seq, token_first, TOKENS: gl.constexpr, HAS_SPANS: gl.constexpr):
    """(first row of q, tokens of the sequence, tokens that this launch computes of it).

    With spans a sequence may have no token at all, even where none has more than one.
    """
    if not HAS_SPANS:
        start = seq
        length = seq * 0 + 1
        count = seq * 0 + 1
    else:
        start = gl.load(cu_seqlens_ptr + seq)
        length = gl.load(cu_seqlens_ptr + seq + 1) - start
        count = gl.maximum(gl.minimum(length - token_first, TOKENS), 0)
    return start, length, count


@gluon.jit
def lowest_key(first_position, length, WINDOW: gl.constexpr):
    """The first key that any query of the piece sees, never beyond the last key."""
    low = length * 0
    if WINDOW > 0:
        low = gl.maximum(gl.minimum(first_position - WINDOW + 1, length - 1), 0)
    return low


@gluon.jit
def publish_chunk(work_ptr, board, board_full, board_empty, turn):
    """Draws the next chunk from the counter and tells the other partitions."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    drawn = gl.atomic_add(work_ptr, 1, sem="relaxed", scope="gpu") + gl.num_programs(0)
    mbarrier.wait(board_empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
    board.index(turn % 2).store(gl.full([1], 0, gl.int32, LAYOUT) + drawn)
    mbarrier.arrive(board_full.index(turn % 2), count=1)
    return drawn


@gluon.jit
def take_chunk(board, board_full, board_empty, turn, WARPS: gl.constexpr):
    """The chunk that was published for this turn."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(board_full.index(turn % 2), (turn // 2) & 1)
    taken = gl.max(board.index(turn % 2).load(LAYOUT), 0)
    if WARPS > 1:
        BARRIER()  # one thread arrives for all
    mbarrier.arrive(board_empty.index(turn % 2), count=1)
    return taken
