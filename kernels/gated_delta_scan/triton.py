"""gated_delta_scan in Triton: each block is made a plain sum of products first, then states pass and outputs follow.

With T the inverse of I + A (see `cpu`), a block adds T beta v - T beta exp(G) k S to its state: the first factor takes
the place of its values, the second one reads the state before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.block_scan import GatedDeltaLayer, ScanPlan
from kernels.block_scan.call import BlockScan
from kernels.block_scan.plan import GRID_TOKENS
from kernels.block_scan.triton import aligned_rows, inverse_length, load_rows, load_scalars, padded, precision
from kernels.launches import allow_next_launch_and_wait, overlap_options

WARPS = 4
# Of fp32 keys, whose factors lie in registers: with keys of 72 a thread has 1,664 bytes of stack. With four warps it
# had 14,536, the first launch took 3.5 GB of an H200's memory (now 0.8) and 3,410 tokens 3.27 ms (0.72), scan included.
WIDE_WARPS = 16

_GRID = tl.constexpr(GRID_TOKENS)


@triton.jit
def product(a, b, HALVES: tl.constexpr, PRECISION: tl.constexpr):
    """Returns a b, of fp16 factors with HALVES: 11 bits of mantissa as tf32 has, in registers where that goes through
    shared memory."""
    if HALVES:
        return tl.dot(a.to(tl.float16), b.to(tl.float16))
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(a, HALVES: tl.constexpr, PRECISION: tl.constexpr):
    """Returns (I + a)^-1 of a strictly lower [GRID, GRID].

    Blocks of 4 on the diagonal are (I - a) (I + a^2), since a^4 = 0 there. Two blocks of a size, with what lies between
    them, are one of twice the size: [[X, 0], [B, Y]]^-1 = [[X^-1, 0], [-Y^-1 B X^-1, Y^-1]]. Higher powers of a would
    be fewer steps, and far larger numbers.
    """
    i, j = tl.arange(0, _GRID)[:, None], tl.arange(0, _GRID)[None, :]
    one = tl.where(i == j, 1.0, 0.0)
    within = tl.where(i // 4 == j // 4, a, 0.0)
    inverse = product(one - within, one + product(within, within, HALVES, PRECISION), HALVES, PRECISION)
    for level in tl.static_range(4):
        is_pair = i // (8 << level) == j // (8 << level)
        between = tl.where(is_pair & (i // (4 << level) != j // (4 << level)), a, 0.0)
        through = product(inverse, between, HALVES, PRECISION)
        inverse -= product(through, inverse, HALVES, PRECISION)
    return inverse


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_rows"])
def solve_blocks(
    q_ptr, k_ptr, g_ptr, beta_ptr, inverses_ptr, scores_ptr, sums_ptr, lengths_ptr, cu_blocks_ptr, blocks_ptr,
    num_rows, norm_eps, stride_q, stride_k, stride_g, stride_beta, stride_lengths,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, NORM: tl.constexpr, HALVES: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    allow_next_launch_and_wait(OVERLAPS)
    block, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    if block < tl.load(cu_blocks_ptr + num_rows):
        first = tl.load(blocks_ptr + block * 2)
        count = tl.load(blocks_ptr + block * 2 + 1)
        token = tl.arange(0, _GRID)
        k = load_rows(k_ptr, first, count, stride_k, head // GROUP, DK, 0, BK)
        q = load_rows(q_ptr, first, count, stride_q, head // GROUP, DK, 0, BK)
        beta = load_scalars(beta_ptr, first, count, stride_beta, head)
        sums = tl.cumsum(load_scalars(g_ptr, first, count, stride_g, head), 0)
        of_head = (first + token).to(tl.int64) * HEADS + head
        tl.store(sums_ptr + of_head, sums, mask=token < count)
        length = tl.full((_GRID,), 1.0, tl.float32)
        if NORM:
            length = inverse_length(k, norm_eps)
            tl.store(lengths_ptr + of_head, length, mask=token < count)
            tl.store(lengths_ptr + stride_lengths + of_head, inverse_length(q, norm_eps), mask=token < count)
        i, j = token[:, None], token[None, :]
        decay = tl.exp(tl.where(i >= j, sums[:, None] - sums[None, :], float("-inf"))) * length[None, :]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
        at = of_head[:, None] * _GRID + token[None, :]
        tl.store(scores_ptr + at, scores.to(k.dtype), mask=(token < count)[:, None])
        products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        products = tl.where(i > j, products * decay, 0.0) * (beta * length)[:, None]
        inverse = unit_lower_inverse(products, HALVES, PRECISION)
        tl.store(inverses_ptr + at, inverse.to(k.dtype), mask=(token < count)[:, None])


class Solved(NamedTuple):
    """What the blocks of a layer with a decay for each head become.

    scores, inverses   [num_tokens, heads, GRID_TOKENS]: rows of each block's matrices
    sums               fp32 [num_tokens, heads]: running sums of g within each block
    lengths            fp32 [2, num_tokens, heads]: what normed keys and queries are multiplied by
    """

    scores: torch.Tensor
    inverses: torch.Tensor
    sums: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def empty(cls, layer: GatedDeltaLayer) -> Solved:
        tokens, heads, _ = layer.v.shape
        scores, inverses = layer.v.new_empty(2, tokens, heads, GRID_TOKENS)
        numbers = layer.v.new_empty((3, tokens, heads), dtype=torch.float32)
        return cls(scores, inverses, numbers[0], numbers[1:])

    def scan(self, layer: GatedDeltaLayer, plan: ScanPlan) -> BlockScan:
        """Returns the plain scan that the layer is now."""
        weights, factors = (None, None) if layer.norm_eps is None else self.lengths
        return BlockScan(
            layer.q, layer.k, layer.v, self.inverses, layer.beta, self.sums, weights, self.scores, factors,
            layer.states, plan, layer.scale, by_value=False, skip=None, gate=None,
        )  # fmt: skip


def solve(layer: GatedDeltaLayer, plan: ScanPlan) -> BlockScan:
    """Returns the plain scan that a layer with a decay for each head is."""
    q, k, v = aligned_rows(layer.q, layer.k, layer.v)
    layer = layer._replace(q=q, k=k, v=v)
    heads, (k_heads, dim_k) = v.shape[1], k.shape[1:]
    solved, has_norm, is_wide = Solved.empty(layer), layer.norm_eps is not None, v.dtype is torch.float32
    strides = (tensor.stride(0) for tensor in (q, k, layer.g, layer.beta))
    with torch.cuda.device_of(v):
        solve_blocks[(plan.max_blocks * heads,)](
            q, k, layer.g, layer.beta, solved.inverses, solved.scores, solved.sums, solved.lengths, plan.cu_blocks,
            plan.blocks, plan.num_rows, layer.norm_eps or 0.0, *strides, solved.sums.numel(),
            HEADS=heads, GROUP=heads // k_heads, DK=dim_k, NORM=has_norm,
            # With keys of length 1 no entry of an inverse is above beta, and 65,504 is far.
            HALVES=has_norm and not is_wide,
            PRECISION=precision(v.dtype), BK=padded(dim_k),
            num_warps=WIDE_WARPS if is_wide else WARPS, **overlap_options(v.device),
        )  # fmt: skip
    return solved.scan(layer, plan)
