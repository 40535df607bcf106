"""gated_delta_scan with a decay for each key channel, in Triton: decays go into queries and keys before states pass.

Between two tokens of a block each channel keeps exp of the sum of its g behind the first, up to the second. As one
factor for each token, counted from the block's begin, it would overflow where channels forget fast. So the block is
halved, and its halves, down to single tokens: six levels. A pair belongs to the one level at which its first token is
in one half and its second token in the next one. There its decay is two factors, both at most 1:

    the second token    exp(sum from its half's begin up to it)
    the first token     exp(sum behind it, up to its half's end)

That is one factor for each token and channel at a level, and all pairs of a level are one product of 64 x 64.

Sums are products with matrices of 0 and 1, so nothing is ever subtracted from one: a channel that forgets all would
leave no digits of what follows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.block_scan import GatedDeltaLayer, ScanPlan
from kernels.block_scan.call import BlockScan
from kernels.block_scan.plan import GRID_TOKENS
from kernels.block_scan.triton import aligned_rows, inverse_length, load_rows, load_scalars, padded
from kernels.gated_delta_scan.triton import unit_lower_inverse
from kernels.launches import allow_next_launch_and_wait, overlap_options

# Warps of a program, and key channels that it holds at a time: products are sums over all of them. 2,048 tokens of 32
# heads on an H200: 218 us, though a thread spills 984 bytes; 64 channels, 224 bytes: 236 us; eight warps with 32, none:
# 395 us.
WARPS, CHANNELS = 4, 128
# The same where factors are fp32, which need twice the room.
WIDE_WARPS, WIDE_CHANNELS = 8, 32

_GRID = tl.constexpr(GRID_TOKENS)
_LEVELS = tl.constexpr(GRID_TOKENS.bit_length() - 1)
# Less than this is taken as this: exp of it is 0 too, but 0 times it is no NaN, and fp16 holds it.
_LEAST = tl.constexpr(-60000.0)


@triton.jit
def near_sums(mask, high, HALVES: tl.constexpr):
    """Returns [GRID, channels]: for each token the sum of `high` over the tokens that its row of `mask` names."""
    # Zeros and ones are exact; of fp32 three products leave 22 bits.
    precision: tl.constexpr = "tf32" if HALVES else "tf32x3"
    return tl.dot(mask.to(high.dtype), high, input_precision=precision)


@triton.jit
def exact_sums(mask, high, low, HALVES: tl.constexpr):
    """The same with the 11 bits of each decay that the first half has no room for: what states keep is fp32."""
    sums = near_sums(mask, high, HALVES)
    if HALVES:
        sums = tl.dot(mask.to(tl.float16), low, sums)
    return sums


@triton.jit
def add_level(
    products, scores, q, k, high, apart, earlier, level, HALVES: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Adds what some channels give of pairs whose tokens lie in two halves of one part of the block, of 2^level each.

    `apart`: the bits in which two tokens differ, the highest of which is their level; `earlier`: the same where the
    first factor's token is the later one, else 0.
    """
    i, j = tl.arange(0, _GRID)[:, None], tl.arange(0, _GRID)[None, :]
    # Tokens of the same half: in a second half those up to the token, in a first one those behind it.
    between = (apart >> level == 0) & ((j > i) != ((i >> level) & 1 != 0))
    decays = tl.exp(near_sums(between, high, HALVES)).to(k.dtype)
    keys = k * decays
    keys_t = tl.trans(keys)
    is_pair = earlier >> level == 1
    products += tl.where(is_pair, tl.dot(keys, keys_t, input_precision=PRECISION), 0.0)
    scores += tl.where(is_pair, tl.dot(q * decays, keys_t, input_precision=PRECISION), 0.0)
    return products, scores


@triton.jit
def store_decayed(reading_ptr, keys_ptr, kept_ptr, at, ok, q, k, high, low, HALVES: tl.constexpr):
    """Writes queries and keys for the state before the block, by what is left of it there, and keys for the one behind
    it, by what is left of them."""
    i, j = tl.arange(0, _GRID)[:, None], tl.arange(0, _GRID)[None, :]
    dtype: tl.constexpr = reading_ptr.dtype.element_ty
    before = tl.exp(exact_sums(j <= i, high, low, HALVES))
    tl.store(reading_ptr + at, (q * before).to(dtype), mask=ok)
    tl.store(keys_ptr + at, (k * before).to(dtype), mask=ok)
    behind = tl.exp(exact_sums(j > i, high, low, HALVES))
    tl.store(kept_ptr + at, (k * behind).to(dtype), mask=ok)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_rows"])
def solve_channels(
    q_ptr, k_ptr, g_ptr, beta_ptr, inverses_ptr, scores_ptr, reading_ptr, keys_ptr, kept_ptr, remains_ptr,
    cu_blocks_ptr, blocks_ptr, num_rows, norm_eps, stride_q, stride_k, stride_g, stride_beta,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, NORM: tl.constexpr, HALVES: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr, CHANNELS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    allow_next_launch_and_wait(OVERLAPS)
    block, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    if block < tl.load(cu_blocks_ptr + num_rows):
        first = tl.load(blocks_ptr + block * 2)
        count = tl.load(blocks_ptr + block * 2 + 1)
        token, k_head = tl.arange(0, _GRID), head // GROUP
        i, j = token[:, None], token[None, :]
        apart = i ^ j
        earlier = tl.where(i > j, apart, 0)
        narrow: tl.constexpr = tl.float16 if HALVES else tl.float32
        length = tl.full((_GRID,), 1.0, tl.float32)
        q_length = length
        if NORM:
            length = inverse_length(load_rows(k_ptr, first, count, stride_k, k_head, DK, 0, BK), norm_eps)
            q_length = inverse_length(load_rows(q_ptr, first, count, stride_q, k_head, DK, 0, BK), norm_eps)
        of_head = (first + token).to(tl.int64) * HEADS + head
        products = tl.zeros((_GRID, _GRID), tl.float32)
        scores = tl.zeros((_GRID, _GRID), tl.float32)
        # Loops stay loops: ptxas took 81 s of an unrolled kernel with fp32 products, and takes 9 to 15 s of this one.
        for column in tl.range(0, DK, CHANNELS, num_stages=1, loop_unroll_factor=1, disable_licm=True):
            k = load_rows(k_ptr, first, count, stride_k, k_head, DK, column, CHANNELS).to(tl.float32) * length[:, None]
            q = load_rows(q_ptr, first, count, stride_q, k_head, DK, column, CHANNELS).to(tl.float32)
            q *= q_length[:, None]
            g = load_rows(g_ptr, first, count, stride_g, head, DK, column, CHANNELS).to(tl.float32)
            g = tl.where(g < _LEAST, _LEAST, g)
            high = g.to(narrow)
            low = (g - high.to(tl.float32)).to(narrow)
            d = column + tl.arange(0, CHANNELS)
            at, ok = of_head[:, None] * DK + d[None, :], (token < count)[:, None] & (d < DK)[None, :]
            store_decayed(reading_ptr, keys_ptr, kept_ptr, at, ok, q, k, high, low, HALVES)
            of_block = (block.to(tl.int64) * HEADS + head) * DK + d
            tl.store(remains_ptr + of_block, tl.exp(tl.sum(g, 0)), mask=d < DK)
            near_q, near_k = q.to(narrow), k.to(narrow)
            scores += tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
            for level in tl.range(0, _LEVELS, num_stages=1, loop_unroll_factor=1, disable_licm=True):
                products, scores = add_level(
                    products, scores, near_q, near_k, high, apart, earlier, level, HALVES, PRECISION
                )  # fmt: skip
        at, ok = of_head[:, None] * _GRID + token[None, :], (token < count)[:, None]
        dtype: tl.constexpr = scores_ptr.dtype.element_ty
        tl.store(scores_ptr + at, scores.to(dtype), mask=ok)
        products *= load_scalars(beta_ptr, first, count, stride_beta, head)[:, None]
        tl.store(inverses_ptr + at, unit_lower_inverse(products, HALVES, PRECISION).to(dtype), mask=ok)


class Decayed(NamedTuple):
    """What the blocks of a layer with a decay for each key channel become.

    scores, inverses      [num_tokens, heads, GRID_TOKENS]: rows of each block's matrices
    reading, keys, kept   [num_tokens, heads, dk]: see `store_decayed`
    remains               fp32 [max_blocks, heads, dk]: what a block leaves of the state before it
    """

    scores: torch.Tensor
    inverses: torch.Tensor
    reading: torch.Tensor
    keys: torch.Tensor
    kept: torch.Tensor
    remains: torch.Tensor

    @classmethod
    def empty(cls, layer: GatedDeltaLayer, plan: ScanPlan) -> Decayed:
        tokens, heads, _ = layer.v.shape
        dim_k = layer.k.shape[2]
        remains = layer.v.new_empty((plan.max_blocks, heads, dim_k), dtype=torch.float32)
        scores, inverses = layer.v.new_empty(2, tokens, heads, GRID_TOKENS)
        reading, keys, kept = layer.v.new_empty(3, tokens, heads, dim_k)
        return cls(scores, inverses, reading, keys, kept, remains)

    def scan(self, layer: GatedDeltaLayer, plan: ScanPlan) -> BlockScan:
        """Returns the plain scan that the layer is now."""
        return BlockScan(
            self.reading, self.keys, layer.v, self.inverses, layer.beta, None, None, self.scores, None, layer.states,
            plan, layer.scale, by_value=False, skip=None, gate=None, kept=self.kept, remains=self.remains,
        )  # fmt: skip


def solve(layer: GatedDeltaLayer, plan: ScanPlan) -> BlockScan:
    """Returns the plain scan that a layer with a decay for each key channel is."""
    q, k, v = aligned_rows(layer.q, layer.k, layer.v)
    layer = layer._replace(q=q, k=k, v=v)
    heads, (k_heads, dim_k) = v.shape[1], k.shape[1:]
    decayed = Decayed.empty(layer, plan)
    has_norm, is_wide = layer.norm_eps is not None, v.dtype is torch.float32
    # Keys of length 1 are halves without loss of range.
    halves = has_norm and not is_wide
    warps, channels = (WARPS, CHANNELS) if halves else (WIDE_WARPS, WIDE_CHANNELS)
    strides = (tensor.stride(0) for tensor in (q, k, layer.g, layer.beta))
    with torch.cuda.device_of(v):
        solve_channels[(plan.max_blocks * heads,)](
            q, k, layer.g, layer.beta, decayed.inverses, decayed.scores, decayed.reading, decayed.keys, decayed.kept,
            decayed.remains, plan.cu_blocks, plan.blocks, plan.num_rows, layer.norm_eps or 0.0, *strides,
            HEADS=heads, GROUP=heads // k_heads, DK=dim_k, NORM=has_norm, HALVES=halves,
            # With three products of tf32 fp32 outputs are within 1.4e-7 of the largest one (an H200, keys of 32).
            PRECISION="tf32x3" if is_wide else "tf32", BK=padded(dim_k), CHANNELS=min(channels, padded(dim_k)),
            num_warps=warps, **overlap_options(v.device),
        )  # fmt: skip
    return decayed.scan(layer, plan)
