"""The arithmetic of the summation tree: a leaf of tiles, the fold of two softmax states, and what a row ends as.

A state is (row_max, row_sum, acc) of some keys: the largest score in log2 units, the sum of 2^(score - row_max), and
the values weighted so. NO_KEYS is the maximum of a state without keys, MASKED the score of a key that is not seen: a
weight of 2^(MASKED - NO_KEYS) is 0, so a state without keys leaves the other one as it was, bit for bit, and a leaf
that is skipped gives what a leaf that is masked gives.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.decode_attention.hopper.quantized import dims_at_once, key_operand, value_operand
from kernels.hopper.barriers import thread_barrier
from kernels.hopper.registers import opaque_zero_of
from kernels.hopper.tails import clear_rows_outside
from kernels.softmax.triton import LN_2, LOG2_E, MASKED, NO_KEYS


@gluon.jit
def fold(row_max, row_sum, acc, other_max, other_sum, other_acc, AXIS: gl.constexpr):
    """The state of both; AXIS is the axis of acc that row_max and row_sum do not have."""
    top = gl.maximum(row_max, other_max)
    keep = gl.exp2(row_max - top)
    weight = gl.exp2(other_max - top)
    row_sum = gl.fma(row_sum, keep, other_sum * weight)
    wide = gl.zeros_like(acc)
    acc = gl.fma(acc, wide + gl.expand_dims(keep, AXIS), other_acc * (wide + gl.expand_dims(weight, AXIS)))
    return top, row_sum, acc


@gluon.jit
def nothing(D: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """A state without keys, acc [D, COLUMNS]."""
    vector: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    row_max = gl.full([COLUMNS], NO_KEYS, gl.float32, vector)
    return row_max, gl.zeros([COLUMNS], gl.float32, vector), gl.zeros([D, COLUMNS], gl.float32, LAYOUT)


@gluon.jit
def fold_parked(row_max, row_sum, parked, other_max, other_sum, other_acc, LAYOUT: gl.constexpr):
    """fold where the first state's acc waits in shared memory, and goes back there."""
    row_max, row_sum, acc = fold(row_max, row_sum, parked.load(LAYOUT), other_max, other_sum, other_acc, 0)
    parked.store(acc)
    return row_max, row_sum


@gluon.jit
def weigh(scored, row_max, scale, cap, visible, masked, SOFTCAP: gl.constexpr):
    """(new row_max, weights [TILE, COLUMNS]) of a tile's raw scores; where `masked`, only `visible` ones count."""
    wide = gl.zeros_like(scored)
    if SOFTCAP:
        # cap * tanh(x) with tanh(x) = 1 - 2 / (e^2x + 1); the scale holds the 2.
        scored = cap - (cap + cap) / (gl.exp2(scored * scale) + 1.0)
    if masked:
        scored = gl.where(visible, scored, MASKED)
    if SOFTCAP:
        top = gl.maximum(row_max, gl.max(scored, 0))
        weights = gl.exp2(scored - top[None, :])
    else:
        top = gl.maximum(row_max, gl.max(scored, 0) * scale)
        weights = gl.exp2(gl.fma(scored, wide + scale, wide - top[None, :]))
    return top, weights


@gluon.jit
def start_scores(q_smem, k_smem, LAYOUT: gl.constexpr):
    """K Q' of a tile, fp32 [TILE, COLUMNS], under way: await it."""
    TILE: gl.constexpr = k_smem.shape[0]
    D: gl.constexpr = k_smem.shape[1]
    COLUMNS: gl.constexpr = q_smem.shape[0]
    product = gl.zeros([TILE, COLUMNS], gl.float32, LAYOUT)
    if k_smem.dtype == q_smem.dtype:
        product = warpgroup_mma(k_smem, q_smem.permute((1, 0)), product, use_acc=False, is_async=True)
    else:
        DIMS: gl.constexpr = dims_at_once(D)
        for part in gl.static_range(0, D, DIMS):
            if part > 0:
                product = warpgroup_mma_wait(0, deps=[product])
            keys = key_operand(k_smem.slice(part, DIMS, 1), LAYOUT)
            queries = q_smem.slice(part, DIMS, 1).permute((1, 0))
            product = warpgroup_mma(keys, queries, product, use_acc=part > 0, is_async=True)
    return product


@gluon.jit
def gather_values(p_smem, v_smem, acc, first, start, stop, LAYOUT: gl.constexpr):
    """acc + V' P' of a tile whose keys count from `first`. Rows outside start..stop may hold anything, even NaN."""
    TILE: gl.constexpr = v_smem.shape[0]
    if v_smem.dtype == p_smem.dtype:
        if (first < start) | (first + TILE > stop):
            for part in gl.static_range(TILE // 8):
                lowest = first + part * 8
                if (lowest < start) | (lowest + 8 > stop):
                    clear_rows_outside(v_smem, part, lowest, start, stop, 8)
            fence_async_shared()
            thread_barrier()
        acc = warpgroup_mma(v_smem.permute((1, 0)), p_smem, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    else:
        KEYS: gl.constexpr = 16
        for part in gl.static_range(0, TILE, KEYS):
            values = value_operand(v_smem, part, KEYS, first, start, stop, LAYOUT)
            acc = warpgroup_mma(values, p_smem.slice(part, KEYS, 0), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
    return acc


@gluon.jit
def sum_leaf(
    rings,
    barriers,
    tile,
    leaf_start,
    key_start,
    key_stop,
    first_position,
    token,
    unit_scores,
    scale,
    cap,
    LEAF: gl.constexpr,
    TOKENS: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """State of a leaf's keys within key_start..key_stop; `token` is each column's token, at first_position + token.

    `unit_scores` [COLUMNS] is what scores of quantized keys are multiplied with; others are not.
    """
    q_smem, p_smem, k_ring, v_ring = rings
    k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = k_ring.shape[0]
    TILE: gl.constexpr = k_ring.shape[1]
    D: gl.constexpr = k_ring.shape[2]
    COLUMNS: gl.constexpr = q_smem.shape[1]
    QUANTIZED: gl.constexpr = k_ring.dtype != q_smem.dtype
    # Whether registers hold a tile's values while its scores are made.
    EARLY: gl.constexpr = QUANTIZED and D <= 128
    # Whether registers are short.
    SHORT: gl.constexpr = D * COLUMNS > 2048
    row = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    row_max, _, acc = nothing(D, COLUMNS, LAYOUT)
    parts = gl.zeros([TILE, COLUMNS], gl.float32, LAYOUT)
    first = gl.maximum(leaf_start, key_start // TILE * TILE)
    stop = gl.minimum(leaf_start + LEAF, key_stop)
    while first < stop:
        at = tile % STAGES
        phase = (tile // STAGES) & 1
        mbarrier.wait(k_full.index(at), phase)
        queries = q_smem.index(opaque_zero_of(first) if SHORT else 0)
        product = start_scores(queries, k_ring.index(at), LAYOUT)
        if EARLY:
            mbarrier.wait(v_full.index(at), phase)
            values = value_operand(v_ring.index(at), 0, TILE, first, key_start, key_stop, LAYOUT)
        scored = warpgroup_mma_wait(0, deps=[product])
        if QUANTIZED:
            scored = scored * unit_scores[None, :]
        else:
            mbarrier.arrive(k_empty.index(at), count=1)
        key = (first + row)[:, None]
        position = (first_position + token)[None, :]
        visible = key <= position
        masked = first + TILE > first_position + 1
        if WINDOW > 0:
            visible = visible & (key > position - WINDOW)
            masked = masked | (first <= first_position + TOKENS - 1 - WINDOW)
        top, weights = weigh(scored, row_max, scale, cap, visible, masked, SOFTCAP)
        keep = gl.exp2(row_max - top)
        parts = gl.fma(parts, gl.zeros_like(parts) + keep[None, :], weights)
        row_max = top
        acc = acc * keep[None, :]
        p_smem.store(weights.to(p_smem.dtype))
        fence_async_shared()
        thread_barrier()
        if QUANTIZED:
            # By now all warps have what they read: their products took it.
            mbarrier.arrive(k_empty.index(at), count=1)
        if EARLY:
            acc = warpgroup_mma(values, p_smem, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
        else:
            mbarrier.wait(v_full.index(at), phase)
            acc = gather_values(p_smem, v_ring.index(at), acc, first, key_start, key_stop, LAYOUT)
        if QUANTIZED:
            thread_barrier()
        mbarrier.arrive(v_empty.index(at), count=1)
        first += TILE
        tile += 1
    return row_max, gl.sum(parts, 0), acc, tile


@gluon.jit
def add_sink(row_max, row_sum, acc, sinks_ptr, head, ok, AXIS: gl.constexpr):
    """One more score with no value, counted once; -inf where there is none, which changes no bit."""
    sink = gl.load(sinks_ptr + head, mask=ok, other=float("-inf")).to(gl.float32) * LOG2_E
    return fold(row_max, row_sum, acc, sink, gl.full_like(row_sum, 1.0), gl.zeros_like(acc), AXIS)


@gluon.jit
def store_rows(
    row_max,
    row_sum,
    acc,
    out_ptrs,
    lse_ptrs,
    value_scale,
    ok,
    AXIS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    """Stores acc / row_sum and the log-sum-exp; a row that saw no key gets 0 and minus infinity."""
    safe = gl.maximum(row_sum, 1.0e-30)
    out = acc / gl.expand_dims(safe, AXIS) * value_scale
    gl.store(out_ptrs, out.to(out_ptrs.dtype.element_ty), mask=gl.expand_dims(ok, AXIS))
    if WANTS_LSE:
        lse = gl.where(row_sum > 0.0, (row_max + gl.log2(safe)) * LN_2, float("-inf"))
        gl.store(lse_ptrs, lse, mask=ok)
