"""What a consumer makes of a tile's scores before online softmax: they are capped, and what is hidden is masked.

Also what it needs before its products: values of hidden rows cleared, queries narrowed to fp16 beside fp8 pages.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.registers import opaque_zero
from kernels.hopper.tails import clear_rows_outside
from kernels.softmax.triton import MASKED


@gluon.jit
def zero(D: gl.constexpr):
    """0, as far as only the program knows: what it is added to is made here, and costs no registers before.

    Narrow tiles leave registers for what all of a program's tiles need, and are 1% slower if it is made for each.
    """
    if D <= 64:
        return 0
    return opaque_zero()


@gluon.jit
def visible(scores, tile, position, nfull, last_low, WINDOW: gl.constexpr, BN: gl.constexpr, SL: gl.constexpr):
    """Scores with what a row does not see MASKED; tiles that all rows see wholly pass as they are."""
    if WINDOW > 0:
        if (tile >= nfull) | (tile * BN < last_low):
            key = (tile * BN + gl.arange(0, BN, gl.SliceLayout(0, SL)))[None, :]
            seen = (key <= position[:, None]) & (key > position[:, None] - WINDOW)
            scores = gl.where(seen, scores, MASKED)
    else:
        if tile >= nfull:
            key = (tile * BN + gl.arange(0, BN, gl.SliceLayout(0, SL)))[None, :]
            scores = gl.where(key <= position[:, None], scores, MASKED)
    return scores


@gluon.jit
def capped(scores, cap_log2, CAP: gl.constexpr, ROWWISE: gl.constexpr):
    """tanh(scores * c) as 1 - 2 / (exp(2 c scores) + 1): the hardware's own tanh is too coarse for a logit."""
    if CAP:
        scores = 1.0 - 2.0 / (gl.exp2(scores * (gl.expand_dims(cap_log2, 1) if ROWWISE else cap_log2)) + 1.0)
    return scores


@gluon.jit
def clear_hidden_values(values, full, phase, tile, lowest, kv_len, BN: gl.constexpr, D: gl.constexpr):
    """Zeros in rows that hold no key of the sequence: their weight is 0, and 0 * NaN would not be.

    Only a sequence's last tile has such rows, and the first one of a window. Both consumers clear them, each before its
    own product; they write the same values.
    """
    if ((tile + 1) * BN > kv_len) | (tile * BN < lowest):
        ROWS: gl.constexpr = 8 if D > 128 else 16
        mbarrier.wait(full, phase)
        for part in gl.static_range(BN // ROWS):
            first = tile * BN + part * ROWS
            if (first + ROWS > kv_len) | (first < lowest):
                clear_rows_outside(values, part, first, lowest, kv_len, ROWS)
        fence_async_shared()
        thread_barrier()


@gluon.jit
def narrow(queries):
    """Converts bf16 queries to fp16, which holds every e4m3 value, in place; returns them and each row's scale.

    bf16 reaches further: a row's largest number is brought to 2^14 or just above by a power of two, unless it is tiny.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    wide = queries.load(LAYOUT).to(gl.float32)
    exponent = gl.maximum((gl.max(gl.abs(wide), 1).to(gl.int32, bitcast=True) >> 23) - 127 - 14, -24)
    power = ((127 - exponent) << 23).to(gl.float32, bitcast=True)
    fp16 = queries._reinterpret(gl.float16, queries.shape, queries.layout)
    fp16.store((wide * gl.expand_dims(power, 1)).to(gl.float16))
    fence_async_shared()
    thread_barrier()
    return fp16, ((127 + exponent) << 23).to(gl.float32, bitcast=True)
