"""Launches the products of few rows in fp32."""

import torch
import triton

from kernels.linear.fp32.hopper import tile_for
from kernels.linear.fp32.hopper.kernel import multiply_few_slices


def launch(x: torch.Tensor, weight: torch.Tensor, partials: torch.Tensor, slice_k: int, block_k: int) -> None:
    """Fills partials [slices, num_outputs, width] in the columns of x's rows, which `takes` takes."""
    num_slices, num_outputs, width = partials.shape
    num_rows, depth = x.shape
    tile = tile_for(num_rows)
    multiply_few_slices[(triton.cdiv(num_outputs, tile.block_n), num_slices)](
        x,
        weight,
        partials,
        num_rows,
        num_outputs,
        depth,
        width,
        x.stride(0),
        weight.stride(0),
        ROWS=tile.rows,
        BLOCK_N=tile.block_n,
        PATCH_N=tile.patch_n,
        PATCH_M=tile.patch_m,
        BLOCK_K=block_k,
        SLICE_K=slice_k,
        num_warps=tile.num_warps,
        launch_pdl=True,
    )
