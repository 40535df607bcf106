"""Weights of attention over gathered keys: 2^(scaled score - top), where a row's top is any whole number above them.

Scaled scores are rounded to multiples of 2^-12, so that differences to whole numbers are exact, and the exponential of
a number below 0 differs from that of the same number minus n by 2^-n exactly. So weights by one top are those by
another times a power of two, bit for bit, and so are their sums and those of values, which products and sums in fp32
keep, down to 2^-126. A loop moves a row's top only where a score exceeds it, and a launch that knows all scores of a
piece takes one top for all.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# 1.5 * 2^11: fp32 sums with it are multiples of 2^-12.
GRID = gl.constexpr(3072.0)
# How far above a row's largest score a loop sets its top: sums are not rescaled until scores have risen by as much.
SLACK = gl.constexpr(16.0)


@gluon.jit
def top_of(scores, scale_log2):
    """Returns the largest score of each row, scaled, rounded up."""
    return gl.ceil(gl.max(scores, 1) * scale_log2)


@gluon.jit
def top_behind(last_top, scores, scale_log2):
    """Returns what is taken from the scores of a tile: the same as before, unless one of the row is larger."""
    top = top_of(scores, scale_log2)
    return gl.where(top > last_top, top + SLACK, last_top)


@gluon.jit
def on_grid(scores, scale_log2):
    """Returns scaled scores + GRID."""
    blank = gl.zeros_like(scores)
    return gl.fma(scores, blank + scale_log2, blank + GRID)


@gluon.jit
def weights_of_scores(scores, scale_log2, top):
    """Returns 2^(scaled score - top of its row)."""
    return gl.exp2(on_grid(scores, scale_log2) - (top + GRID)[:, None])


@gluon.jit
def sum_of_tile(weights):
    """Returns the sums of each row's first 32 and last 32 weights, added."""
    ROWS: gl.constexpr = weights.shape[0]
    halves = gl.sum(weights.reshape([ROWS, 2, 32]), 2)
    return gl.convert_layout(gl.sum(halves, 1), gl.SliceLayout(1, weights.type.layout))
