"""grouped_linear in Triton: one program for one tile of an expert's rows and BLOCK_N of its outputs.

Programs that follow each other share a tile of rows and go through its expert's outputs, so that an expert's weights
are in the cache when its next tile reads them: 8,192 tokens of gpt-oss took 448 TFLOP/s the other way round, and take
528 (H200, tiles of 128 x 128).

A row's bits do not depend on the size of its tile. The weights are the wide operand of each product, so that a tile of
16 rows and one of 128 are the same instruction (a wgmma of 64 outputs and 16 steps of depth) with more or fewer
columns; each element is one chain of sums over the depth in ascending order, in fp32, rounded once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.grouped_linear.plan import ExpertPlan


class Tile(NamedTuple):
    """What a program computes with; BLOCK_K is the same for all tiles of a dtype, since it cuts the chain of sums."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_for(dtype: torch.dtype, tile_rows: int) -> Tile:
    """Returns the tile for a plan of `tile_rows`. fp32 does not use tensor cores, which would round it to 10 bits.

    Few rows wait for weights alone: narrow tiles are more programs that wait at once. Many rows wait for products:
    wide tiles read each row less often.
    """
    if dtype is torch.float32:
        return Tile(64, 16, 4, 2)
    return {16: Tile(64, 64, 4, 6), 64: Tile(128, 64, 4, 4), 128: Tile(256, 64, 8, 4)}[tile_rows]


@triton.jit
def multiply_pairs(
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    num_tiles_ptr,
    out_ptr,
    num_outputs,
    num_blocks,
    depth,
    stride_x_row,
    stride_weight_expert,
    stride_weight_row,
    stride_bias_expert,
    PAIRS_OF_ROW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Outputs beyond the last one repeat it and are not stored, nor are rows beyond the tile's."""
    tile = tl.program_id(0) // num_blocks
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
    place = tl.load(tiles_ptr + 2 * tile + 1) + tl.arange(0, TILE_ROWS)
    is_row = place < tl.load(starts_ptr + expert + 1)
    pair = tl.load(order_ptr + place, mask=is_row, other=0).to(tl.int64)
    n = tl.program_id(0) % num_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, num_outputs - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_row = x_ptr + (pair // PAIRS_OF_ROW)[None, :] * stride_x_row
    weight_row = weight_ptr + expert * stride_weight_expert + n_read[:, None] * stride_weight_row
    acc = tl.zeros((BLOCK_N, TILE_ROWS), dtype=tl.float32)
    for first in range(0, depth, BLOCK_K):
        column = first + k
        weight = tl.load(weight_row + column[None, :], mask=column[None, :] < depth, other=0.0)
        x = tl.load(x_row + column[:, None], mask=(column[:, None] < depth) & is_row[None, :], other=0.0)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * stride_bias_expert + n_read).to(tl.float32)[:, None]
    out = out_ptr + pair[None, :] * num_outputs + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & (n < num_outputs)[:, None])


def launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: ExpertPlan, out: torch.Tensor
) -> None:
    """Fills out; checked, non-empty arguments."""
    num_outputs, tile = out.shape[1], tile_for(x.dtype, plan.tile_rows)
    num_blocks = triton.cdiv(num_outputs, tile.block_n)
    with torch.cuda.device_of(x):
        multiply_pairs[(plan.tiles.shape[0] * num_blocks,)](
            x,
            weight,
            weight if bias is None else bias,
            *plan[:4],
            out,
            num_outputs,
            num_blocks,
            weight.shape[2],
            x.stride(0),
            weight.stride(0),
            weight.stride(1),
            0 if bias is None else bias.stride(0),
            PAIRS_OF_ROW=plan.num_pairs // x.shape[0],
            TILE_ROWS=plan.tile_rows,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            HAS_BIAS=bias is not None,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
