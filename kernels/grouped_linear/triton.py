"""grouped_linear in Triton: one program for one tile of an expert's rows and BLOCK_N of its outputs.

Programs that follow each other share a tile of rows and go through its expert's outputs, so that an expert's weights
are in the cache when its next tile reads them: 8,192 tokens of gpt-oss took 448 TFLOP/s the other way round, and take
528 (H200, tiles of 128 x 128).

A row's bits do not depend on the size of its tile. The weights are the wide operand of each product, so that a tile of
16 rows and one of 128 are the same instruction (a wgmma of 64 outputs and 16 steps of depth) with more or fewer
columns; each element is one chain of sums over the depth in ascending order, in fp32, rounded once.

Stored weights are read as they are and become x's dtype in registers: their value times their factor in fp32, rounded
once, in the layout in which the tensor cores take them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.grouped_linear.plan import ExpertPlan
from kernels.grouped_linear.stored import Fp8Experts, StoredExperts
from kernels.launches import allow_next_launch_and_wait, overlap_options

PLAIN: tl.constexpr = tl.constexpr(0)
FP8: tl.constexpr = tl.constexpr(1)
MXFP4: tl.constexpr = tl.constexpr(2)
# Rows and columns of fp8 with one factor, and columns of mxfp4.
FP8_BLOCK: tl.constexpr = tl.constexpr(128)
MX_BLOCK: tl.constexpr = tl.constexpr(32)


class Tile(NamedTuple):
    """What a program computes with; BLOCK_K is the same for all tiles of a dtype, since it cuts the chain of sums."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_for(dtype: torch.dtype, tile_rows: int, *, is_stored: bool = False) -> Tile:
    """Returns the tile for a plan of `tile_rows`. fp32 does not use tensor cores, which would round it to 10 bits.

    Few rows wait for weights alone: narrow tiles are more programs that wait at once. Many rows wait for products:
    wide tiles read each row less often. Each warp group makes 64 outputs of stored weights.
    """
    if dtype is torch.float32:
        return Tile(64, 16, 4, 2)
    if is_stored:
        return Tile(128, 64, 8, 5 if tile_rows == 16 else 4)
    wide = {32: Tile(64, 64, 4, 5), 64: Tile(128, 64, 4, 4), 128: Tile(256, 64, 8, 4)}
    return wide.get(tile_rows, Tile(64, 64, 4, 6))


@triton.jit
def fp8_weights(codes_row, factors, first, depth, dtype: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns [BLOCK_N, BLOCK_K] from pointers to rows [BLOCK_N, 1] and to their factors [BLOCK_N / 128 or 1, 1, 1]."""
    column = first + tl.arange(0, BLOCK_K)
    codes = tl.load(codes_row + column[None, :], mask=column[None, :] < depth, other=0.0)
    GROUPS: tl.constexpr = factors.shape[0]
    # A tensor of one element, not a scalar: a scalar keeps the codes from being loaded as the products take them.
    factor = tl.load(factors + first // FP8_BLOCK)
    factor = factor.broadcast_to(GROUPS, codes.shape[0] // GROUPS, BLOCK_K).reshape(codes.shape)
    return (codes.to(tl.float32) * factor).to(dtype)


@triton.jit
def mxfp4_weights(pairs_row, scales_row, first, depth, dtype: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns [BLOCK_N, BLOCK_K] from pointers to rows of bytes and to rows of exponents [BLOCK_N, 1].

    The three low bits of e2m1 are exponent and mantissa of fp32 once they lie where these meet: a number 2**126 times
    as small, 0 and 0.5 included.
    """
    BLOCKS: tl.constexpr = BLOCK_K // MX_BLOCK
    NUM_BYTES: tl.constexpr = BLOCK_K // 2
    byte = first // 2 + tl.arange(0, NUM_BYTES)
    pairs = tl.load(pairs_row + byte[None, :], mask=byte[None, :] < depth // 2, other=0).to(tl.uint32)
    block = first // MX_BLOCK + tl.arange(0, BLOCKS)
    exponents = tl.load(scales_row + block[None, :], mask=block[None, :] < depth // MX_BLOCK, other=0).to(tl.uint32)
    # 2**-127 is no normal number.
    powers = tl.maximum(exponents << 23, 1 << 22).to(tl.float32, bitcast=True)
    factor = powers[:, :, None].broadcast_to(pairs.shape[0], BLOCKS, NUM_BYTES // BLOCKS).reshape(pairs.shape)
    low = ((pairs & 7) << 22) | ((pairs & 8) << 28)
    high = ((pairs & 0x70) << 18) | ((pairs & 0x80) << 24)
    low_values = (low.to(tl.float32, bitcast=True) * 2.0**126 * factor).to(dtype)
    high_values = (high.to(tl.float32, bitcast=True) * 2.0**126 * factor).to(dtype)
    return tl.join(low_values, high_values).reshape(pairs.shape[0], BLOCK_K)


# How many pairs there are changes from batch to batch: a new number must not mean a new compilation.
@triton.jit(do_not_specialize=["num_pairs"])
def multiply_pairs(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    num_tiles_ptr,
    out_ptr,
    num_pairs,
    num_outputs,
    num_blocks,
    depth,
    stride_x_row,
    stride_weight_expert,
    stride_weight_row,
    stride_scales_expert,
    stride_scales_row,
    stride_bias_expert,
    PAIRS_OF_ROW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Outputs beyond the last one repeat it and are not stored, nor are rows beyond the tile's."""
    allow_next_launch_and_wait(OVERLAPS)
    tile = tl.program_id(0) // num_blocks
    # Two rounds of loads, not four one after another: places behind the last tile are memory that nobody has written.
    num_tiles = tl.load(num_tiles_ptr)
    expert = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
    place = tl.load(tiles_ptr + 2 * tile + 1) + tl.arange(0, TILE_ROWS)
    if tile >= num_tiles:
        return
    end = tl.load(starts_ptr + expert + 1)
    pair = tl.load(order_ptr + place, mask=place < num_pairs, other=0).to(tl.int64)
    is_row = place < end
    first_n = tl.program_id(0) % num_blocks * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, num_outputs - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_row = x_ptr + (pair // PAIRS_OF_ROW)[None, :] * stride_x_row
    weight_row = weight_ptr + expert * stride_weight_expert + n_read[:, None] * stride_weight_row
    scales = scales_ptr + expert * stride_scales_expert
    if FORMAT == FP8:
        GROUPS: tl.constexpr = (BLOCK_N + FP8_BLOCK - 1) // FP8_BLOCK
        group = tl.minimum(first_n // FP8_BLOCK + tl.arange(0, GROUPS), (num_outputs - 1) // FP8_BLOCK)
        factors = scales + group[:, None, None] * stride_scales_row
    elif FORMAT == MXFP4:
        scales_row = scales + n_read[:, None] * stride_scales_row
    acc = tl.zeros((BLOCK_N, TILE_ROWS), dtype=tl.float32)
    for first in range(0, depth, BLOCK_K):
        column = first + k
        if FORMAT == FP8:
            weight = fp8_weights(weight_row, factors, first, depth, x_ptr.dtype.element_ty, BLOCK_K)
        elif FORMAT == MXFP4:
            weight = mxfp4_weights(weight_row, scales_row, first, depth, x_ptr.dtype.element_ty, BLOCK_K)
        else:
            weight = tl.load(weight_row + column[None, :], mask=column[None, :] < depth, other=0.0)
        x = tl.load(x_row + column[:, None], mask=(column[:, None] < depth) & is_row[None, :], other=0.0)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * stride_bias_expert + n_read).to(tl.float32)[:, None]
    out = out_ptr + pair[None, :] * num_outputs + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & (n < num_outputs)[:, None])


def launch(
    x: torch.Tensor,
    weight: torch.Tensor | StoredExperts,
    bias: torch.Tensor | None,
    plan: ExpertPlan,
    out: torch.Tensor,
) -> None:
    """Fills out; checked, non-empty arguments."""
    values, scales = (weight, weight) if isinstance(weight, torch.Tensor) else weight
    is_stored = not isinstance(weight, torch.Tensor)
    num_outputs, tile = out.shape[1], tile_for(x.dtype, plan.tile_rows, is_stored=is_stored)
    num_blocks = triton.cdiv(num_outputs, tile.block_n)
    with torch.cuda.device_of(x):
        multiply_pairs[(plan.tiles.shape[0] * num_blocks,)](
            x,
            values,
            scales,
            x if bias is None else bias,
            *plan[:4],
            out,
            plan.num_pairs,
            num_outputs,
            num_blocks,
            x.shape[1],
            x.stride(0),
            values.stride(0),
            values.stride(1),
            scales.stride(0),
            scales.stride(1),
            0 if bias is None else bias.stride(0),
            PAIRS_OF_ROW=plan.num_pairs // x.shape[0],
            TILE_ROWS=plan.tile_rows,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            HAS_BIAS=bias is not None,
            FORMAT=(FP8 if isinstance(weight, Fp8Experts) else MXFP4 if is_stored else PLAIN).value,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **overlap_options(x.device),
        )
