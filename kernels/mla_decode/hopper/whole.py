"""Weights of a tile relative to whole numbers, for leaves that several kernels compute with the same bits.

A weight is 2^(scaled score - base), and a row's base may be any whole number above its scores (kernels/hopper/gathered/
weights.py): weights and sums by one base are those by another times a power of two. So a kernel's bases move only where
a score exceeds one, and stay SLACK above it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.gathered.weights import top_behind, weights_of_scores
from kernels.hopper.softmax import any_in_warp


@gluon.jit
def _thread_tops(scores):
    """Returns the largest scores [rows, 4] that each of the four threads of a row has."""
    ROWS: gl.constexpr = scores.shape[0]
    return gl.max(gl.max(scores.reshape([ROWS, scores.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def thread_leads(scores, base, scale_log2):
    """Returns how far the largest scores [rows, 4] of the four threads of a row lie above its base, scaled."""
    tops = _thread_tops(scores)
    by_row = gl.expand_dims(gl.convert_layout(base, gl.SliceLayout(1, tops.type.layout)), 1)
    return gl.fma(tops, gl.zeros_like(tops) + scale_log2, gl.zeros_like(tops) - by_row)


@gluon.jit
def _base_for(scores, base, scale_log2):
    """Returns bases above a tile's scores. A warp looks for a row's largest where a thread has one above a base."""
    if any_in_warp(thread_leads(scores, base, scale_log2), 0.0):
        base = top_behind(base, scores, scale_log2)
    return base


@gluon.jit
def weigh(scores, base, scale_log2):
    """Returns a tile's weights in bf16, their rows' sums, and bases above its scores."""
    base = _base_for(scores, base, scale_log2)
    weights = weights_of_scores(scores, scale_log2, base)
    return weights.to(gl.bfloat16), gl.sum(weights, 1), base


@gluon.jit
def moved(x, by):
    """Returns sums [rows, columns] relative to bases that are `by` higher; most warps' are the same."""
    if any_in_warp(by, 0.0):
        x = x * gl.expand_dims(gl.exp2(-by), 1)
    return x


@gluon.jit
def level(base, row_sum):
    """Returns the logarithm to base 2 of sums of weights, -inf where there are none: the same bits for any base."""
    bits = row_sum.to(gl.int32, bitcast=True)
    share = ((bits & 0x7FFFFF) | 0x3F800000).to(gl.float32, bitcast=True)
    whole = base + ((bits >> 23) - 127).to(gl.float32)
    return gl.where(row_sum == 0.0, float("-inf"), whole + gl.log2(share))
