"""What all partitions of a program agree on: splits, how a pair is cut into them, and the keys of a split.

Into how many splits a step is cut is decided in ../splits_triton.py.
A split is a run of leaves of one pair (sequence, kv head), or all of them. Streams and consumers walk the same splits
in the same order by themselves. Where a pair is cut follows from its length and its number of splits alone, so that the
program that merges the pair can compute which partials exist. A plan for a window divides what lies from a pair's
origin on: its splits count leaves and tiles from there. Leaves and groups stay where they are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def read_split(splits_ptr, split):
    """Returns a split and the number of splits.

    A split is (sequence, kv head, first leaf, leaves, length, splits of the pair, its first partial).
    Splits of a pair that is cut at groups are below 0.
    """
    at = splits_ptr + split * 8
    seq, head, leaf, leaves = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    return (seq, head, leaf, leaves, gl.load(at + 4), gl.load(at + 5), gl.load(at + 6)), gl.load(at + 7)


@gluon.jit
def origin_of(length, PLANNED: gl.constexpr, LEAF: gl.constexpr):
    """Returns the first leaf that a plan divides: that of the first of the PLANNED newest keys; 0 where all are."""
    origin = length * 0
    if PLANNED > 0:
        origin = gl.maximum(length - PLANNED, 0) // LEAF
    return origin


@gluon.jit
def split_of(leaf, splits, tiles, PER_LEAF: gl.constexpr):
    """Returns the split of a pair that has this leaf, the inverse of split_start; leaves and tiles from the origin on.

    As many splits as leaves have one each.
    """
    tiles = gl.maximum(tiles, splits * PER_LEAF)
    return gl.minimum((splits * (PER_LEAF // 2) * (2 * leaf + 1) - 1) // tiles, splits - 1)


@gluon.jit
def others_of(
    skipped, origin, splits, tiles, PER_LEAF: gl.constexpr, LEAVES_PER_GROUP: gl.constexpr, BY_GROUP: gl.constexpr
):
    """Returns how many of a pair's splits have leaves that are not skipped, less one: the last to arrive merges.

    With BY_GROUP splits may be below 0: cut at groups, from the sequence's beginning on, as many for each but the last.
    """
    PER_GROUP: gl.constexpr = PER_LEAF * LEAVES_PER_GROUP
    if BY_GROUP and splits < 0:
        room = PER_GROUP * (0 - splits)
        groups = (gl.maximum(tiles - (PER_GROUP // 2 - 1), 1) + room - 1) // room
        others = gl.maximum(0 - splits - 1 - skipped // (groups * LEAVES_PER_GROUP), 0)
    else:
        others = splits - 1 - split_of(skipped - origin, splits, tiles, PER_LEAF)
    return others


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
    """The first key that any query of the sequence sees, never beyond the last key."""
    low = length * 0
    if WINDOW > 0:
        low = gl.maximum(gl.minimum(first_position - WINDOW + 1, length - 1), 0)
    return low
