"""gated_delta_scan with a decay for each key channel, in Triton: decays go into queries and keys before states pass.

Between two tokens of a block each channel keeps exp of the sum of its g behind the first, up to the second. As one
factor for each token, counted from the block's begin, it would overflow where channels forget fast. So a block is cut
into sub-blocks of 16 tokens (as in Kimi Linear: An Expressive, Efficient Attention Architecture, 2025):

    pairs within a sub-block   the sum grows by one token with the distance; each pair has its own exponential
    pairs of two sub-blocks    exp(sum from the later one's begin) times exp(sum to it), both at most 1

Nothing is ever subtracted from a sum: a channel that forgets all would leave no digits of what follows.
"""

import torch
import triton
import triton.language as tl

from kernels.block_scan import GatedDeltaLayer, ScanPlan
from kernels.block_scan.call import BlockScan
from kernels.block_scan.plan import GRID_TOKENS, SUB_TOKENS
from kernels.block_scan.triton import inverse_length, load_rows, load_scalars, padded, precision
from kernels.gated_delta_scan.triton import unit_lower_inverse

WARPS = 8
# Key channels that a program holds at a time: products are sums over all of them.
CHANNELS = 32

_GRID, _SUB = tl.constexpr(GRID_TOKENS), tl.constexpr(SUB_TOKENS)
_SUBS = tl.constexpr(GRID_TOKENS // SUB_TOKENS)


@triton.jit
def load_near(ptr, first, count, stride, head, shift, D: tl.constexpr, column, BLOCK: tl.constexpr):
    """Returns [GRID, BLOCK] in fp32: for each token the row `shift` tokens on, zeros outside of its sub-block."""
    token = tl.arange(0, _GRID)[:, None]
    other, d = token + shift, column + tl.arange(0, BLOCK)[None, :]
    ok = (other >= 0) & (other // _SUB == token // _SUB) & (other < count) & (d < D)
    at = ptr + first.to(tl.int64) * stride + head * D
    return tl.load(at + (other * stride + d), mask=ok, other=0.0).to(tl.float32)


@triton.jit
def sums_of_subs(rows, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    """Returns running sums over the tokens of each sub-block."""
    subs = tl.reshape(rows, (_SUBS, _SUB, BLOCK))
    return tl.reshape(tl.cumsum(subs, 1, reverse=REVERSE), (_GRID, BLOCK))


@triton.jit
def add_near(
    products, scores, q, k, k_ptr, g_ptr, first, count, stride_k, stride_g, k_head, head, column,
    DK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds what some channels give of each pair of one sub-block."""
    token = tl.arange(0, _GRID)
    total = tl.zeros((_GRID, BLOCK), tl.float32)
    for distance in range(_SUB):
        key = load_near(k_ptr, first, count, stride_k, k_head, -distance, DK, column, BLOCK) * tl.exp(total)
        # Behind the first token of the pair, up to the second.
        total += load_near(g_ptr, first, count, stride_g, head, -distance, DK, column, BLOCK)
        here = token[:, None] - token[None, :] == distance
        products += tl.where(here, tl.sum(k * key, 1)[:, None], 0.0)
        scores += tl.where(here, tl.sum(q * key, 1)[:, None], 0.0)
    return products, scores


@triton.jit
def add_far(products, scores, q, k, sums, reach, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Adds what some channels give of each pair of two sub-blocks. Returns besides, in logs: what is left at each
    one's begin of the state before the block, behind the block of what came at each token, and of that state."""
    token = tl.arange(0, _GRID)[:, None]
    sub = token // _SUB
    before = tl.zeros((_GRID, BLOCK), tl.float32)
    remains = tl.zeros((BLOCK,), tl.float32)
    grown = tl.exp(sums)
    for later in tl.static_range(_SUBS):
        # Of the sub-blocks before this one: up to its begin, then up to its end.
        if later > 0:
            far = tl.trans(tl.where(sub < later, k * tl.exp(reach), 0.0))
            products += tl.where(sub == later, tl.dot(k * grown, far, input_precision=PRECISION), 0.0)
            scores += tl.where(sub == later, tl.dot(q * grown, far, input_precision=PRECISION), 0.0)
        total = tl.sum(tl.where(token == later * _SUB + _SUB - 1, sums, 0.0), 0)
        reach = tl.where(sub < later, reach + total[None, :], reach)
        before = tl.where(sub > later, before + total[None, :], before)
        remains += total
    return products, scores, before, reach, remains


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_rows"])
def solve_channels(
    q_ptr, k_ptr, g_ptr, beta_ptr, inverses_ptr, scores_ptr, reading_ptr, keys_ptr, kept_ptr, remains_ptr,
    cu_blocks_ptr, blocks_ptr, num_rows, norm_eps, stride_q, stride_k, stride_g, stride_beta,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, NORM: tl.constexpr, HALVES: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    if block < tl.load(cu_blocks_ptr + num_rows):
        first = tl.load(blocks_ptr + block * 2)
        count = tl.load(blocks_ptr + block * 2 + 1)
        token, k_head = tl.arange(0, _GRID), head // GROUP
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        length = tl.full((_GRID,), 1.0, tl.float32)
        q_length = length
        if NORM:
            length = inverse_length(load_rows(k_ptr, first, count, stride_k, k_head, DK, 0, BK), norm_eps)
            q_length = inverse_length(load_rows(q_ptr, first, count, stride_q, k_head, DK, 0, BK), norm_eps)
        of_head = (first + token).to(tl.int64) * HEADS + head
        products = tl.zeros((_GRID, _GRID), tl.float32)
        scores = tl.zeros((_GRID, _GRID), tl.float32)
        for column in range(0, DK, CHANNELS):
            k = load_rows(k_ptr, first, count, stride_k, k_head, DK, column, CHANNELS).to(tl.float32)
            q = load_rows(q_ptr, first, count, stride_q, k_head, DK, column, CHANNELS).to(tl.float32)
            products, scores = add_near(
                products, scores, q, k, k_ptr, g_ptr, first, count, stride_k, stride_g, k_head, head, column, DK,
                CHANNELS,
            )  # fmt: skip
            own = load_near(g_ptr, first, count, stride_g, head, 0, DK, column, CHANNELS)
            sums = sums_of_subs(own, CHANNELS, False)
            behind = load_near(g_ptr, first, count, stride_g, head, 1, DK, column, CHANNELS)
            reach = sums_of_subs(behind, CHANNELS, True)
            products, scores, before, reach, remains = add_far(products, scores, q, k, sums, reach, CHANNELS, PRECISION)
            d = column + tl.arange(0, CHANNELS)
            at, ok = of_head[:, None] * DK + d[None, :], (token < count)[:, None] & (d < DK)[None, :]
            grown = tl.exp(before + sums)
            tl.store(reading_ptr + at, (q * q_length[:, None] * grown).to(dtype), mask=ok)
            tl.store(keys_ptr + at, (k * length[:, None] * grown).to(dtype), mask=ok)
            tl.store(kept_ptr + at, (k * length[:, None] * tl.exp(reach)).to(dtype), mask=ok)
            of_block = (block.to(tl.int64) * HEADS + head) * DK + d
            tl.store(remains_ptr + of_block, tl.exp(remains), mask=d < DK)
        at, ok = of_head[:, None] * _GRID + token[None, :], (token < count)[:, None]
        tl.store(scores_ptr + at, (scores * q_length[:, None] * length[None, :]).to(dtype), mask=ok)
        beta = load_scalars(beta_ptr, first, count, stride_beta, head)
        products *= (beta * length)[:, None] * length[None, :]
        products = tl.where(token[:, None] > token[None, :], products, 0.0)
        tl.store(inverses_ptr + at, unit_lower_inverse(products, HALVES, PRECISION).to(dtype), mask=ok)


def solve(layer: GatedDeltaLayer, plan: ScanPlan) -> BlockScan:
    """Returns the plain scan that a layer with a decay for each key channel is."""
    q, k, v = layer.q, layer.k, layer.v
    tokens, heads, _ = v.shape
    k_heads, dim_k = k.shape[1:]
    scores, inverses = v.new_empty(2, tokens, heads, GRID_TOKENS)
    reading, keys, kept = v.new_empty(3, tokens, heads, dim_k)
    remains = v.new_empty((plan.max_blocks, heads, dim_k), dtype=torch.float32)
    has_norm = layer.norm_eps is not None
    strides = (tensor.stride(0) for tensor in (q, k, layer.g, layer.beta))
    with torch.cuda.device_of(v):
        solve_channels[(plan.max_blocks * heads,)](
            q, k, layer.g, layer.beta, inverses, scores, reading, keys, kept, remains, plan.cu_blocks, plan.blocks,
            plan.num_rows, layer.norm_eps or 0.0, *strides,
            HEADS=heads, GROUP=heads // k_heads, DK=dim_k, NORM=has_norm,
            HALVES=has_norm and v.dtype is not torch.float32,
            PRECISION=precision(v.dtype), BK=padded(dim_k), CHANNELS=CHANNELS, num_warps=WARPS,
        )  # fmt: skip
    return BlockScan(
        reading, keys, v, inverses, layer.beta, None, None, scores, None, layer.states, plan, layer.scale,
        by_value=False, skip=None, gate=None, kept=kept, remains=remains,
    )  # fmt: skip
