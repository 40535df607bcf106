"""What both kernels for few heads do with a tile's scores: latents are rows of products and queries their columns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import thread_barrier
from kernels.mla_decode.hopper.leaves import clear_tail
from kernels.softmax.triton import MASKED


@gluon.jit
def add_tile(
    scores, sums, first, length, latents, empty, s, handed, key, scale_log2, TILE: gl.constexpr, is_part=False
):
    """Adds the weights and weighted latents of stage s, a tile from `first` on, and gives its halves back when read.

    With is_part it is a part of the result in place of latents, whose rows have one score each: of that, the weight is
    a power of two, and so not rounded. Returns `sums`: the rows' maxima, weights [latents, rows], and values of
    dimensions 0 .. 255 and 256 .. 511.
    """
    row_max, partial_sums, low, high = sums
    left, right = latents
    left_empty, right_empty = empty
    if first + TILE > length:
        scores = gl.where((first + key < length)[:, None], scores, MASKED)
    peak = gl.max(scores, 0) * scale_log2
    new_max = gl.maximum(row_max, peak)
    if is_part:
        new_max = peak + gl.ceil(new_max - peak)
    weights = gl.exp2(scores * scale_log2 - new_max[None, :])
    decay = gl.exp2(row_max - new_max)[None, :]
    # All have read the last tile's weights: their maximum went through a barrier.
    handed.store(weights.to(gl.bfloat16))
    fence_async_shared()
    if first + TILE > length:
        clear_tail(left.index(s), length - first, TILE)
        clear_tail(right.index(s), length - first, TILE)
    thread_barrier()
    low = warpgroup_mma(left.index(s).permute((1, 0)), handed, low * decay, is_async=True)
    high = warpgroup_mma(right.index(s).permute((1, 0)), handed, high * decay, is_async=True)
    partial_sums = gl.fma(partial_sums, decay + gl.zeros_like(partial_sums), weights)
    low = warpgroup_mma_wait(1, deps=[low])
    mbarrier.arrive(left_empty.index(s), count=1)
    high = warpgroup_mma_wait(0, deps=[high])
    mbarrier.arrive(right_empty.index(s), count=1)
    return new_max, partial_sums, low, high
