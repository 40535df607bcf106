"""What all partitions of a program agree on: chunks, the segments of pairs in them, and the keys of a segment.

A chunk is a run of units over consecutive pairs (sequence, kv head); the part of a pair that lies in one chunk is a
segment. Streams and consumers walk the same chunks in the same order by themselves.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
    """The first key that any query of the segment sees, never beyond the last key."""
    low = length * 0
    if WINDOW > 0:
        low = gl.maximum(gl.minimum(first_position - WINDOW + 1, length - 1), 0)
    return low
