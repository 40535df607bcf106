"""Scans in Triton: states pass from block to block in one launch, then all blocks compute their outputs in another.

    pass_states     a program for a row, a head and some of its values: the state goes through the row's blocks one by
                    one; each block's first state is written down for the second launch
    block_outputs   a program for a block, a head and some of its values

Tiles have one size for each shape of heads, so that a row's bits are those that it has alone.
"""

import torch
import triton
import triton.language as tl

from kernels.block_scan.call import BlockScan
from kernels.block_scan.plan import GRID_TOKENS
from kernels.block_scan.steps import SOFTPLUS_LIMIT
from kernels.state_slots.triton import slots_of_row

PASS_VALUES = 32
OUTPUT_VALUES = 64
PASS_WARPS = 4
OUTPUT_WARPS = 4

_GRID = tl.constexpr(GRID_TOKENS)
_SOFTPLUS_LIMIT = tl.constexpr(SOFTPLUS_LIMIT)


@triton.jit
def load_rows(ptr, first, count, stride, head, D: tl.constexpr, column, BLOCK: tl.constexpr):
    """Returns [GRID, BLOCK] elements from `column` on of one head of a block's tokens, zeros behind them."""
    token = tl.arange(0, _GRID)
    d = column + tl.arange(0, BLOCK)
    at = (first + token).to(tl.int64)[:, None] * stride + head * D + d[None, :]
    return tl.load(ptr + at, mask=(token < count)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def load_scalars(ptr, first, count, stride, head):
    """Returns fp32 [GRID] of one head, zeros behind a block's tokens."""
    token = tl.arange(0, _GRID)
    return tl.load(ptr + (first + token).to(tl.int64) * stride + head, mask=token < count, other=0.0).to(tl.float32)


@triton.jit
def inverse_length(rows, norm_eps):
    wide = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + norm_eps)


@triton.jit
def step_sizes(raw, least, most):
    """Returns softplus within limits; of a small exponential by its first terms, since 1 + e has lost its last bits."""
    e = tl.exp(tl.minimum(raw, _SOFTPLUS_LIMIT))
    logarithm = tl.where(e < 1e-3, e - e * e * 0.5, tl.log(1.0 + e))
    sizes = tl.where(raw > _SOFTPLUS_LIMIT, raw, logarithm)
    # Comparisons rather than minima, which would make a NaN a number.
    return tl.where(sizes < least, least, tl.where(sizes > most, most, sizes))


@triton.jit
def last_sum(sums, count):
    """Returns the running sum at a block's last token."""
    return tl.sum(tl.where(tl.arange(0, _GRID) == count - 1, sums, 0.0), 0)


@triton.jit
def state_places(head, column, DK: tl.constexpr, DV: tl.constexpr, BY_VALUE: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr):  # fmt: skip
    """Returns where [BK, BV] elements of a head's state lie in a slot, and which of them there are."""
    d = tl.arange(0, BK)[:, None]
    e = column + tl.arange(0, BV)[None, :]
    place = e * DK + d if BY_VALUE else d * DV + e
    return head * (DK * DV) + place, (d < DK) & (e < DV)


@triton.jit
def pass_states(
    k_ptr, v_ptr, readers_ptr, sums_ptr, weights_ptr, before_ptr, states_ptr, cu_blocks_ptr, blocks_ptr, leave_ptr,
    working_ptr, restore_ptr, fresh_ptr, rolling_ptr, norm_eps, stride_k, stride_v, stride_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HAS_READERS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, NORM: tl.constexpr, BY_VALUE: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    column = tl.program_id(1) * BV
    source, working = slots_of_row(row, working_ptr, restore_ptr, fresh_ptr)
    place, ok = state_places(head, column, DK, DV, BY_VALUE, BK, BV)
    if working > 0:
        state = tl.load(states_ptr + source * stride_slot + place, mask=ok & (source > 0), other=0.0)
        begin = tl.load(cu_blocks_ptr + row)
        before = before_ptr + begin.to(tl.int64) * (HEADS * DK * DV) + place
        for block in range(begin, tl.load(cu_blocks_ptr + row + 1)):
            first = tl.load(blocks_ptr + block * 2)
            count = tl.load(blocks_ptr + block * 2 + 1)
            k = load_rows(k_ptr, first, count, stride_k, head // GROUP, DK, 0, BK)
            v = load_rows(v_ptr, first, count, stride_v, head, DV, column, BV)
            sums = load_scalars(sums_ptr, first, count, HEADS, head)
            narrow = state.to(k.dtype)
            tl.store(before, narrow, mask=ok)
            before += HEADS * DK * DV
            wide = v.to(tl.float32)
            if HAS_READERS:
                readers = load_rows(readers_ptr, first, count, HEADS * DK, head, DK, 0, BK)
                wide -= tl.dot(readers, narrow, input_precision=PRECISION)
                token, e = tl.arange(0, _GRID), column + tl.arange(0, BV)
                at = (first + token).to(tl.int64)[:, None] * stride_v + head * DV + e[None, :]
                tl.store(v_ptr + at, wide.to(v.dtype), mask=(token < count)[:, None] & (e < DV)[None, :])
            end = last_sum(sums, count)
            part = tl.exp(end - sums)
            if HAS_WEIGHTS:
                part *= load_scalars(weights_ptr, first, count, HEADS, head)
            if NORM:
                part *= inverse_length(k, norm_eps)
            added = tl.dot(tl.trans(k), (wide * part[:, None]).to(k.dtype), input_precision=PRECISION)
            state = state * tl.exp(end) + added
            left = tl.load(leave_ptr + block).to(tl.int64)
            tl.store(states_ptr + left * stride_slot + place, state, mask=ok & (left > 0))
        rolling = tl.load(rolling_ptr + row).to(tl.int64)
        tl.debug_barrier()  # a row without tokens reads and writes its state alike
        tl.store(states_ptr + rolling * stride_slot + place, state, mask=ok & (rolling > 0))
        tl.store(states_ptr + working * stride_slot + place, state, mask=ok)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_rows"])
def block_outputs(
    q_ptr, k_ptr, v_ptr, sums_ptr, weights_ptr, before_ptr, skip_ptr, gate_ptr, out_ptr, cu_blocks_ptr, blocks_ptr,
    num_rows, scale, norm_eps, stride_q, stride_k, stride_v, stride_gate,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, NORM: tl.constexpr, BY_VALUE: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    column = tl.program_id(1) * BV
    if block < tl.load(cu_blocks_ptr + num_rows):
        first = tl.load(blocks_ptr + block * 2)
        count = tl.load(blocks_ptr + block * 2 + 1)
        q = load_rows(q_ptr, first, count, stride_q, head // GROUP, DK, 0, BK)
        k = load_rows(k_ptr, first, count, stride_k, head // GROUP, DK, 0, BK)
        v = load_rows(v_ptr, first, count, stride_v, head, DV, column, BV)
        sums = load_scalars(sums_ptr, first, count, HEADS, head)
        i, j = tl.arange(0, _GRID)[:, None], tl.arange(0, _GRID)[None, :]
        decay = tl.exp(tl.where(i >= j, sums[:, None] - sums[None, :], float("-inf")))
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
        if HAS_WEIGHTS:
            scores *= load_scalars(weights_ptr, first, count, HEADS, head)[None, :]
        if NORM:
            scores *= inverse_length(k, norm_eps)[None, :]
        place, ok = state_places(head, column, DK, DV, BY_VALUE, BK, BV)
        before = tl.load(before_ptr + block.to(tl.int64) * (HEADS * DK * DV) + place, mask=ok, other=0.0)
        out = tl.dot(q, before, input_precision=PRECISION) * tl.exp(sums)[:, None]
        out = tl.dot(scores.to(v.dtype), v, out, input_precision=PRECISION) * scale
        if NORM:
            out *= inverse_length(q, norm_eps)[:, None]
        if HAS_SKIP:
            out += v.to(tl.float32) * tl.load(skip_ptr + head).to(tl.float32)
        if HAS_GATE:
            gate = load_rows(gate_ptr, first, count, stride_gate, head, DV, column, BV).to(tl.float32)
            out *= gate / (1.0 + tl.exp(-gate))
        token, e = tl.arange(0, _GRID), column + tl.arange(0, BV)
        at = (first + token).to(tl.int64)[:, None] * (HEADS * DV) + head * DV + e[None, :]
        tl.store(out_ptr + at, out.to(v.dtype), mask=(token < count)[:, None] & (e < DV)[None, :])


def precision(dtype: torch.dtype) -> str:
    """Returns how products with fp32 factors are computed: of 16-bit inputs with 11 bits of mantissa, which spills no
    register where three products of halves do."""
    return "ieee" if dtype is torch.float32 else "tf32"


def padded(dim: int) -> int:
    """Returns the tile that holds a head, at least 32: a product of bf16 keys of 16, Triton 3.6, ended with an illegal
    memory access on an H200."""
    return max(32, int(triton.next_power_of_2(dim)))


def launch_scan(scan: BlockScan, out: torch.Tensor) -> None:
    """Fills out, writes the states; checked, non-empty arguments."""
    plan, slots, states = scan.plan, scan.plan.slots, scan.states
    heads, dim_v = scan.v.shape[1:]
    k_heads, dim_k = scan.k.shape[1:]
    before = scan.v.new_empty((plan.max_blocks, heads, *states.shape[2:]))
    nothing = scan.sums
    norm_eps, weights = scan.norm_eps or 0.0, nothing if scan.weights is None else scan.weights
    shared = {
        "HEADS": heads, "GROUP": heads // k_heads, "DK": dim_k, "DV": dim_v, "HAS_WEIGHTS": scan.weights is not None,
        "NORM": scan.norm_eps is not None, "BY_VALUE": scan.by_value, "PRECISION": precision(scan.v.dtype),
        "BK": padded(dim_k),
    }  # fmt: skip
    width = min(PASS_VALUES, padded(dim_v))
    with torch.cuda.device_of(out):
        pass_states[(plan.num_rows * heads, triton.cdiv(dim_v, width))](
            scan.k, scan.v, nothing if scan.readers is None else scan.readers, scan.sums, weights, before, states,
            plan.cu_blocks, plan.blocks, plan.leave_slot, slots.working, slots.restore, slots.fresh, slots.rolling,
            norm_eps, scan.k.stride(0), scan.v.stride(0), states.stride(0),
            HAS_READERS=scan.readers is not None, BV=width, num_warps=PASS_WARPS, **shared,
        )  # fmt: skip
        width = min(OUTPUT_VALUES, padded(dim_v))
        gate = nothing if scan.gate is None else scan.gate
        block_outputs[(plan.max_blocks * heads, triton.cdiv(dim_v, width))](
            scan.q, scan.k, scan.v, scan.sums, weights, before, nothing if scan.skip is None else scan.skip, gate, out,
            plan.cu_blocks, plan.blocks, plan.num_rows, scan.scale, norm_eps,
            scan.q.stride(0), scan.k.stride(0), scan.v.stride(0), gate.stride(0),
            HAS_SKIP=scan.skip is not None, HAS_GATE=scan.gate is not None, BV=width, num_warps=OUTPUT_WARPS, **shared,
        )  # fmt: skip
