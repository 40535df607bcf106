"""Scores and softmax of one tile of keys, for both consumers of mla_decode cut by load."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from kernels.hopper.registers import opaque_zero_of
from kernels.hopper.softmax import any_in_warp, weigh
from kernels.mla_decode.hopper.whole import thread_leads
from kernels.softmax.triton import MASKED

# How far, in units of log2, a score may lie above its row's base without moving it.
LEAD = gl.constexpr(8.0)


@gluon.jit
def start_scores(q, latents, full, s, phase, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Issues the products of 64 rows of queries and a tile's latents; returns the scores [64, TILE] to wait for."""
    q_left, q_right, q_rope = q
    left, right, rope = latents
    left_full, right_full, rope_full = full
    # Not a 0 that the compiler knows: it would keep descriptors of the queries, two registers for each of 36 products.
    zero = opaque_zero_of(s)
    zeros = gl.zeros([64, TILE], gl.float32, LAYOUT)
    mbarrier.wait(rope_full.index(s), phase)
    part = warpgroup_mma(q_rope.index(zero), rope.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(left_full.index(s), phase)
    part = warpgroup_mma(q_left.index(zero), left.index(s).permute((1, 0)), part, is_async=True)
    mbarrier.wait(right_full.index(s), phase)
    return warpgroup_mma(q_right.index(zero), right.index(s).permute((1, 0)), part, is_async=True)


@gluon.jit
def masked(scores, first, last_seen, q_len, length, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the scores of the keys from `first` on without those behind the last that a row sees."""
    if first + TILE > length - q_len + 1:
        column = first + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(column[None, :] <= last_seen[:, None], scores, MASKED)
    return scores


@gluon.jit
def weighed(scores, base, scale_log2):
    """Returns a tile's weights in bf16, their rows' sums, and the rows' bases, which moved where a score was far above.

    A weight is 2^(scaled score - base), and so at most 2^LEAD.
    """
    if any_in_warp(thread_leads(scores, base, scale_log2), LEAD):
        top = gl.max(scores, 1) * scale_log2
        base = gl.where(top > base + LEAD, top, base)
    weights = weigh(scores, base, scale_log2)
    return weights.to(gl.bfloat16), gl.sum(weights, 1), base
