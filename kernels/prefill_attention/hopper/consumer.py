"""A consumer warpgroup: 64 rows of a tile, its products on the tensor cores, softmax, and the store.

Key tiles arrive in shared memory, values with garbage where no key is. QK of a tile is issued before PV of the one
before it, so that the tensor cores work while softmax does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.registers import opaque_zero
from kernels.hopper.tails import clear_rows_outside
from kernels.prefill_attention.hopper.tiles import key_tiles, read_tile
from kernels.softmax.triton import LN_2, LOG2_E, MASKED, NO_KEYS


@gluon.jit
def _zero(D: gl.constexpr):
    """0, as far as only the program knows: what it is added to is made here, and costs no registers before.

    Narrow tiles leave registers for what all of a program's tiles need, and are 1% slower if it is made for each.
    """
    if D <= 64:
        return 0
    return opaque_zero()


@gluon.jit
def _widened_here(stride, D: gl.constexpr):
    """A stride whose upper half an address needs: made here, and still known to be a multiple of 16 if it is one."""
    return stride + 16 * _zero(D)


@gluon.jit
def _visible(scores, tile, position, nfull, last_low, WINDOW: gl.constexpr, BN: gl.constexpr, SL: gl.constexpr):
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
def _weigh(scores, row_max, base, scale, ROWWISE: gl.constexpr):
    """(row_max, base, weights, decay): the largest score so far, that score scaled, factor of older sums.

    The scale is folded into exp2. Bases are kept, not computed again from maxima: where the maximum stays, decay is 1.
    """
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    new_base = new_max * scale
    factor = gl.zeros_like(scores) + (gl.expand_dims(scale, 1) if ROWWISE else scale)
    weights = gl.exp2(gl.fma(scores, factor, gl.expand_dims(-new_base, 1) + gl.zeros_like(scores)))
    return new_max, new_base, weights, gl.exp2(base - new_base)


@gluon.jit
def _capped(scores, cap_log2, CAP: gl.constexpr, ROWWISE: gl.constexpr):
    """tanh(scores * c) as 1 - 2 / (exp(2 c scores) + 1): the hardware's own tanh is too coarse for a logit."""
    if CAP:
        scores = 1.0 - 2.0 / (gl.exp2(scores * (gl.expand_dims(cap_log2, 1) if ROWWISE else cap_log2)) + 1.0)
    return scores


@gluon.jit
def _clear_hidden_values(values, full, phase, tile, lowest, kv_len, BN: gl.constexpr, D: gl.constexpr):
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
def _narrow(queries, D: gl.constexpr):
    """Converts bf16 queries to fp16, which holds every e4m3 value, in place; returns them and each row's scale.

    bf16 reaches further: a row's largest number is brought to 2^14 or just above by a power of two, unless it is tiny.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    wide = queries.load(LAYOUT).to(gl.float32)
    exponent = gl.maximum((gl.max(gl.abs(wide), 1).to(gl.int32, bitcast=True) >> 23) - 127 - 14, -24)
    power = ((127 - exponent) << 23).to(gl.float32, bitcast=True)
    narrow = queries._reinterpret(gl.float16, queries.shape, queries.layout)
    narrow.store((wide * gl.expand_dims(power, 1)).to(gl.float16))
    fence_async_shared()
    thread_barrier()
    return narrow, ((127 + exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def consume(
    out_ptr, lse_ptr, sinks_ptr, k_scales_ptr, v_scales_ptr, scale_log2, cap_log2, num_tokens,
    stride_out_token, stride_out_head, qs, ks, vs, queue,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    PART: gl.constexpr, HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, DIM: gl.constexpr, D: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    WANTS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr, SCALES: gl.constexpr, Q_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Half of a tile's rows: 64 of them in one warpgroup."""
    ROWS: gl.constexpr = 64
    QUERIES: gl.constexpr = 128 // GQA_GROUP
    DTYPE: gl.constexpr = qs.dtype
    NARROWS: gl.constexpr = ks.dtype != DTYPE
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    QL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SL, k_width=2)
    RS: gl.constexpr = gl.SliceLayout(1, SL)
    RO: gl.constexpr = gl.SliceLayout(1, OL)
    zeros = gl.zeros([ROWS, BN], gl.float32, SL)
    if SCALES:
        # Quantized values: the keys' scale goes to where scores are scaled, the values' scale to the output.
        if CAP:
            cap_log2 = cap_log2 * gl.load(k_scales_ptr)
        else:
            scale_log2 = scale_log2 * gl.load(k_scales_ptr)
    step = 0
    turn = 0
    mbarrier.wait(q_full.index(0), 0)
    head, first, token, q_len, kv_len = read_tile(queue)
    while head >= 0:
        cached = kv_len - q_len
        lowest, start, stop = key_tiles(first, q_len, kv_len, QUERIES, WINDOW, BN)
        nfull = (cached + first + 1) // BN
        last_low = cached + first + QUERIES - WINDOW
        position = cached + first + (PART * ROWS + gl.arange(0, ROWS, RS) + _zero(D)) // GQA_GROUP
        row_max = gl.full([ROWS], NO_KEYS, gl.float32, RS)
        base = gl.zeros([ROWS], gl.float32, RS)
        row_sum = gl.full([ROWS], 0.0, gl.float32, RS)
        acc = gl.zeros([ROWS, D], gl.float32, OL)
        q = qs.index(PART).load(QL) if Q_REGISTERS else qs.index(PART)
        scale = scale_log2
        cap = cap_log2
        if NARROWS:
            q, unit = _narrow(q, D)
            unit = gl.convert_layout(unit, RS)
            if CAP:
                cap = cap_log2 * unit
                scale = scale_log2 + gl.zeros_like(unit)
            else:
                scale = scale_log2 * unit
        # The first key tile: there is no earlier one whose values could be added meanwhile.
        slot = step % STAGES
        mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
        scores = warpgroup_mma(q, ks.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(slot), count=1)
        if Q_REGISTERS:
            # Only a product that took the queries proves that they have come out of shared memory: loads may queue
            # behind the last tile's stores, where barriers overtake them and the copy engine would, too.
            mbarrier.arrive(q_empty.index(0), count=1)
        scores = _visible(_capped(scores, cap, CAP, NARROWS), start, position, nfull, last_low, WINDOW, BN, SL)
        row_max, base, weights, decay = _weigh(scores, row_max, base, scale, NARROWS)
        row_sum = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(ks.dtype), PL)
        if WINDOW > 0:
            _clear_hidden_values(vs.index(slot), v_full.index(slot), (step // STAGES) & 1, start, lowest, kv_len, BN, D)
        for tile in range(start + 1, stop):
            before = step % STAGES
            before_phase = (step // STAGES) & 1
            step += 1
            slot = step % STAGES
            mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
            scores = warpgroup_mma(q, ks.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), before_phase)
            acc = warpgroup_mma(p, vs.index(before), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_empty.index(slot), count=1)
            scores = _visible(_capped(scores, cap, CAP, NARROWS), tile, position, nfull, last_low, WINDOW, BN, SL)
            row_max, base, weights, decay = _weigh(scores, row_max, base, scale, NARROWS)
            row_sum = gl.fma(row_sum, decay, gl.sum(weights, 1))
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(decay, RO)[:, None]
            p = gl.convert_layout(weights.to(ks.dtype), PL)
        if not Q_REGISTERS:
            mbarrier.arrive(q_empty.index(0), count=1)
        before = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(v_full.index(before), phase)
        _clear_hidden_values(vs.index(before), v_full.index(before), phase, stop - 1, lowest, kv_len, BN, D)
        acc = warpgroup_mma(p, vs.index(before), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(before), count=1)
        step += 1

        # Row numbers are made when they are needed: the loop has no registers for them.
        row_s = PART * ROWS + gl.arange(0, ROWS, RS) + _zero(D)
        if HAS_SINKS:
            # Once, behind the last key: the sink has no value, so it only adds to the sum.
            sink = gl.load(sinks_ptr + head * GQA_GROUP + row_s % GQA_GROUP).to(gl.float32) * LOG2_E
            raised = gl.maximum(base, sink)
            decay = gl.exp2(base - raised)
            row_sum = gl.fma(row_sum, decay, gl.exp2(sink - raised))
            acc = acc * gl.convert_layout(decay, RO)[:, None]
            base = raised
        weight = 1.0 / row_sum
        if SCALES:
            weight = weight * gl.load(v_scales_ptr)
        acc = acc * gl.convert_layout(weight, RO)[:, None]
        row = PART * ROWS + gl.arange(0, ROWS, RO) + _zero(D)
        query = first + row // GQA_GROUP
        live = (row < QUERIES * GQA_GROUP) & (query < q_len)
        at = (token + query).to(gl.int64) * _widened_here(stride_out_token, D)
        at += (head * GQA_GROUP + row % GQA_GROUP) * stride_out_head
        d = gl.arange(0, D, gl.SliceLayout(0, OL))
        gl.store(out_ptr + at[:, None] + d[None, :], acc.to(DTYPE), mask=live[:, None] & (d < DIM)[None, :])
        if WANTS_LSE:
            query_s = first + row_s // GQA_GROUP
            live_s = (row_s < QUERIES * GQA_GROUP) & (query_s < q_len)
            at_s = (head * GQA_GROUP + row_s % GQA_GROUP).to(gl.int64) * _widened_here(num_tokens, D) + token + query_s
            gl.store(lse_ptr + at_s, (base + gl.log2(row_sum)) * LN_2, mask=live_s)
        turn += 1
        mbarrier.wait(q_full.index(0), turn & 1)
        head, first, token, q_len, kv_len = read_tile(queue)
