"""Scans in Triton: one program for a row, a head and some of its values takes the row's blocks one by one.

The state stays in registers; what a block reads of it, and what its own tokens give, becomes the block's outputs before
the next one is taken. Tiles have one size for each shape of heads, so that a row's bits are those that it has alone.
"""

import torch
import triton
import triton.language as tl

from kernels.block_scan.call import BlockScan
from kernels.block_scan.plan import GRID_TOKENS
from kernels.block_scan.steps import SOFTPLUS_LIMIT
from kernels.launches import allow_next_launch_and_wait, overlap_options
from kernels.state_slots.triton import slots_of_row

# Values of a program. With the delta rule's inverses half as many: two programs share a processor then, and each waits
# for product after product (8,192 tokens on an H200: 537 us, with 32 values 566).
VALUES, DELTA_VALUES = 32, 16
WARPS = 4
# Of fp32 values, whose factors lie in registers. With four warps and stages a thread has 32 registers and, with keys of
# 72, 7,512 bytes of stack, now 3,912.
WIDE_WARPS = 8
# Blocks on their way to shared memory, and the one that is worked on; with decays of channels there is more of each.
STAGES, CHANNEL_STAGES = 3, 2
# Keys of more channels do not fit in stages.
MAX_STAGED_CHANNELS = 128

_GRID = tl.constexpr(GRID_TOKENS)
_SOFTPLUS_LIMIT = tl.constexpr(SOFTPLUS_LIMIT)


@triton.jit
def load_rows(ptr, first, count, stride, head, D: tl.constexpr, column, BLOCK: tl.constexpr):
    """Returns [GRID, BLOCK] elements from `column` on of one head of a block's tokens, zeros behind them."""
    token = tl.arange(0, _GRID)[:, None]
    d = column + tl.arange(0, BLOCK)[None, :]
    at = ptr + first.to(tl.int64) * stride + head * D  # elements of a block are near: 32 bits do from here on
    return tl.load(at + (token * stride + d), mask=(token < count) & (d < D), other=0.0)


@triton.jit
def load_scalars(ptr, first, count, stride, head):
    """Returns fp32 [GRID] of one head, zeros behind a block's tokens."""
    token = tl.arange(0, _GRID)
    at = ptr + first.to(tl.int64) * stride + head
    return tl.load(at + token * stride, mask=token < count, other=0.0).to(tl.float32)


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
def clear_outputs(out_ptr, begin, end, head, e, HEADS: tl.constexpr, DV: tl.constexpr):
    """Writes zeros as the outputs of tokens `begin` to `end` - 1."""
    for first in range(begin, end, _GRID):
        token = first + tl.arange(0, _GRID)
        at = out_ptr + token.to(tl.int64)[:, None] * (HEADS * DV) + head * DV + e[None, :]
        zeros = tl.zeros(at.shape, out_ptr.dtype.element_ty)
        tl.store(at, zeros, mask=(token < end)[:, None] & (e < DV)[None, :])


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def scan_blocks(
    q_ptr, k_ptr, v_ptr, inverses_ptr, beta_ptr, sums_ptr, weights_ptr, scores_ptr, factors_ptr, skip_ptr, gate_ptr,
    kept_ptr, remains_ptr, states_ptr, out_ptr, cu_seqlens_ptr, cu_blocks_ptr, blocks_ptr, leave_ptr, working_ptr,
    restore_ptr, fresh_ptr, rolling_ptr, num_rows, num_tokens, scale, stride_q, stride_k, stride_v, stride_beta,
    stride_gate, stride_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HAS_INVERSES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, HAS_FACTORS: tl.constexpr,
    HAS_CHANNELS: tl.constexpr, BY_VALUE: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    allow_next_launch_and_wait(OVERLAPS)
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    column = tl.program_id(1) * BV
    source, working = slots_of_row(row, working_ptr, restore_ptr, fresh_ptr)
    place, ok = state_places(head, column, DK, DV, BY_VALUE, BK, BV)
    begin = tl.load(cu_blocks_ptr + row)
    end = tl.load(cu_blocks_ptr + row + 1)
    token, e = tl.arange(0, _GRID), column + tl.arange(0, BV)
    if working > 0:
        state = tl.load(states_ptr + source * stride_slot + place, mask=ok & (source > 0), other=0.0)
        for block in tl.range(begin, end, num_stages=STAGES):
            first = tl.load(blocks_ptr + block * 2)
            count = tl.load(blocks_ptr + block * 2 + 1)
            q = load_rows(q_ptr, first, count, stride_q, head // GROUP, DK, 0, BK)
            k = load_rows(k_ptr, first, count, stride_k, head // GROUP, DK, 0, BK)
            v = load_rows(v_ptr, first, count, stride_v, head, DV, column, BV)
            if not HAS_CHANNELS:
                sums = load_scalars(sums_ptr, first, count, HEADS, head)
            narrow = state.to(k.dtype)
            wide = v.to(tl.float32)
            if HAS_INVERSES:
                if HAS_CHANNELS:
                    wide -= tl.dot(k, narrow, input_precision=PRECISION)
                else:
                    decay = tl.exp(sums)
                    if HAS_WEIGHTS:
                        decay *= load_scalars(weights_ptr, first, count, HEADS, head)
                    wide -= tl.dot(k, narrow, input_precision=PRECISION) * decay[:, None]
                wide *= load_scalars(beta_ptr, first, count, stride_beta, head)[:, None]
                inverse = load_rows(inverses_ptr, first, count, HEADS * _GRID, head, _GRID, 0, _GRID)
                wide = tl.dot(inverse, wide.to(k.dtype), input_precision=PRECISION)
            if HAS_CHANNELS:
                out = tl.dot(q, narrow, input_precision=PRECISION)
                scores = load_rows(scores_ptr, first, count, HEADS * _GRID, head, _GRID, 0, _GRID)
                kept = load_rows(kept_ptr, first, count, stride_k, head // GROUP, DK, 0, BK)
                added = tl.dot(tl.trans(kept), wide.to(k.dtype), input_precision=PRECISION)
                of_block = tl.full((BK,), 0, tl.int64) + block
                at_channel = (of_block * (HEADS // GROUP) + head // GROUP) * DK + tl.arange(0, BK)
                remains = tl.load(remains_ptr + at_channel, mask=tl.arange(0, BK) < DK, other=0.0)
                state = state * remains[:, None] + added
            else:
                total = last_sum(sums, count)
                part = tl.exp(total - sums)
                if HAS_WEIGHTS:
                    part *= load_scalars(weights_ptr, first, count, HEADS, head)
                out = tl.dot(q, narrow, input_precision=PRECISION) * tl.exp(sums)[:, None]
                scores = load_rows(scores_ptr, first, count, HEADS * _GRID, head, _GRID, 0, _GRID)
                added = tl.dot(tl.trans(k), (wide * part[:, None]).to(k.dtype), input_precision=PRECISION)
                state = state * tl.exp(total) + added
            left = tl.load(leave_ptr + block).to(tl.int64)
            tl.store(states_ptr + left * stride_slot + place, state, mask=ok & (left > 0))
            out = tl.dot(scores, wide.to(v.dtype), out, input_precision=PRECISION) * scale
            if HAS_FACTORS:
                out *= load_scalars(factors_ptr, first, count, HEADS, head)[:, None]
            if HAS_SKIP:
                out += wide * tl.load(skip_ptr + head).to(tl.float32)
            if HAS_GATE:
                gate = load_rows(gate_ptr, first, count, stride_gate, head, DV, column, BV).to(tl.float32)
                out *= gate / (1.0 + tl.exp(-gate))
            at = out_ptr + first.to(tl.int64) * (HEADS * DV) + head * DV
            at += token[:, None] * (HEADS * DV) + e[None, :]
            tl.store(at, out.to(v.dtype), mask=(token < count)[:, None] & (e < DV)[None, :])
        rolling = tl.load(rolling_ptr + row).to(tl.int64)
        tl.debug_barrier()  # a row without tokens reads and writes its state alike
        tl.store(states_ptr + rolling * stride_slot + place, state, mask=ok & (rolling > 0))
        tl.store(states_ptr + working * stride_slot + place, state, mask=ok)
    else:
        cleared, behind = tl.load(cu_seqlens_ptr + row), tl.load(cu_seqlens_ptr + row + 1)
        clear_outputs(out_ptr, cleared, behind, head, e, HEADS, DV)
    if row == num_rows - 1:
        clear_outputs(out_ptr, tl.load(cu_seqlens_ptr + num_rows), num_tokens, head, e, HEADS, DV)


def precision(dtype: torch.dtype) -> str:
    """Returns how products with fp32 factors are computed: of 16-bit inputs with 11 bits of mantissa, which spills no
    register where three products of halves do."""
    return "ieee" if dtype is torch.float32 else "tf32"


def padded(dim: int) -> int:
    """Returns the tile that holds a head, at least 32: a product of bf16 keys of 16, Triton 3.6, ended with an illegal
    memory access on an H200."""
    return max(32, int(triton.next_power_of_2(dim)))


def aligned_rows(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the rows, each [num_tokens, heads, dim]; all of them copied unless each begins at a multiple of 16 bytes
    and has a stride of a multiple of 16 elements, by which Triton knows it.

    A length is a sum over a row in the order in which threads hold it: 16 bytes each, or one element of other rows. So
    slices of wider rows had other bits than rows of their own. With one element each of two threads adds its own
    square, not rounded, to the rounded one of the other: two sums, and a race for which one is used.
    """
    if all(each.data_ptr() % 16 == 0 and each.stride(0) % 16 == 0 for each in rows):
        return rows
    return tuple(_copied(each) for each in rows)


def _copied(rows: torch.Tensor) -> torch.Tensor:
    tokens, heads, dim = rows.shape
    width = heads * dim
    copied = rows.new_empty(tokens, triton.cdiv(width, 16) * 16)[:, :width]
    aligned: torch.Tensor = copied.copy_(rows.flatten(1)).unflatten(1, (heads, dim))
    return aligned


def num_stages(keys: torch.Tensor, has_channels: bool) -> int:
    """Returns how many blocks of aligned rows are on their way to shared memory at once.

    Of 16 bits, ptxas 12.8 builds addresses of products from a register that it never wrote: with stages where keys have
    an odd size, without them where it is even. That gives wrong rows, or an illegal memory access.
    """
    if keys.dtype is torch.float32 or keys.shape[2] % 2:
        return 1
    if has_channels:
        return CHANNEL_STAGES if keys.shape[2] <= MAX_STAGED_CHANNELS else 1
    return STAGES


def launch_scan(scan: BlockScan, out: torch.Tensor) -> None:
    """Fills out, with zeros for tokens of no row, and writes the states; checked, non-empty arguments."""
    plan, slots, states = scan.plan, scan.plan.slots, scan.states
    heads, dim_v = scan.v.shape[1:]
    k_heads, dim_k = scan.k.shape[1:]
    nothing = scan.scores if scan.sums is None else scan.sums
    optional = (scan.inverses, scan.beta, scan.weights, scan.factors, scan.skip, scan.gate, scan.remains)
    inverses, beta, weights, factors, skip, gate, remains = (
        nothing if tensor is None else tensor for tensor in optional
    )
    q, k, v, *decayed = aligned_rows(*(rows for rows in (scan.q, scan.k, scan.v, scan.kept) if rows is not None))
    width = min(VALUES if scan.inverses is None else DELTA_VALUES, padded(dim_v))
    with torch.cuda.device_of(out):
        scan_blocks[(plan.num_rows * heads, triton.cdiv(dim_v, width))](
            q, k, v, inverses, beta, nothing, weights, scan.scores, factors, skip, gate, *(decayed or [nothing]),
            remains, states, out, plan.cu_seqlens_q, plan.cu_blocks, plan.blocks, plan.leave_slot, slots.working,
            slots.restore, slots.fresh, slots.rolling, plan.num_rows, out.shape[0], scan.scale, q.stride(0),
            k.stride(0), v.stride(0), beta.stride(0), gate.stride(0), states.stride(0),
            HEADS=heads, GROUP=heads // k_heads, DK=dim_k, DV=dim_v, HAS_INVERSES=scan.inverses is not None,
            HAS_WEIGHTS=scan.weights is not None, HAS_FACTORS=scan.factors is not None,
            HAS_SKIP=scan.skip is not None, HAS_GATE=scan.gate is not None, HAS_CHANNELS=scan.kept is not None,
            BY_VALUE=scan.by_value, PRECISION=precision(v.dtype), BK=padded(dim_k), BV=width,
            STAGES=num_stages(k, scan.kept is not None),
            num_warps=WIDE_WARPS if v.dtype is torch.float32 else WARPS, **overlap_options(out.device),
        )  # fmt: skip
