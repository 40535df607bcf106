"""Triton kernel of linear's TILED route: one tile size for every number of rows, one loop over K in ascending order.

Shapes were checked before. For 16-bit shapes whose library GEMM is not row-stable; fp32 has kernels of its own.
"""

import torch
import triton
import triton.language as tl

BLOCK_M = 64
BLOCK_N = 128
BLOCK_K = 64
# Row tiles that run side by side, so that they find the weights in the L2 cache.
GROUP_M = 8


@triton.jit
def multiply_tile(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    depth,
    stride_x_row,
    stride_weight_row,
    stride_out_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """out[m, n] of one tile; rows and outputs beyond the edge repeat the last ones and are not stored."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    first_m = tl.program_id(0) // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    m = ((first_m + within % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (within // group_m * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_row = x_ptr + tl.minimum(m, num_rows - 1)[:, None] * stride_x_row
    weight_row = weight_ptr + tl.minimum(n, num_outputs - 1)[None, :] * stride_weight_row
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, depth, BLOCK_K):
        columns = first + k
        x = tl.load(x_row + columns[None, :], mask=columns[None, :] < depth, other=0.0)
        weight = tl.load(weight_row + columns[:, None], mask=columns[:, None] < depth, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + tl.minimum(n, num_outputs - 1)).to(tl.float32)[None, :]
    target = out_ptr + m[:, None] * stride_out_row + n[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < num_outputs)[None, :])


def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    num_rows, num_outputs = out.shape
    tiles = triton.cdiv(num_rows, BLOCK_M) * triton.cdiv(num_outputs, BLOCK_N)
    multiply_tile[(tiles,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        num_outputs,
        weight.shape[1],
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        GROUP_M=GROUP_M,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=4,
    )
