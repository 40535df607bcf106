"""Launches linear's Gluon kernel: descriptors of weights and rows, and the number of programs."""

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.device import num_multiprocessors
from kernels.linear.hopper import Tiles, columns_for, tiles_for
from kernels.linear.hopper.kernel import multiply_few

_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Fills out; arguments that `reason_against` has nothing against."""
    num_outputs, depth = weight.shape
    launch_tiles(x, weight, bias, out, tiles_for(x.shape[0], num_outputs, depth, num_multiprocessors(x.device)))


def launch_tiles(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tiles: Tiles
) -> None:
    """The same with given tiles."""
    (num_rows, depth), num_outputs = x.shape, weight.shape[0]
    columns = columns_for(num_rows)
    programs = min(triton.cdiv(num_outputs, tiles.block_n), num_multiprocessors(x.device))
    with torch.cuda.device_of(x):
        multiply_few[(programs,)](
            _rows_descriptor(weight, tiles.block_n, tiles.block_k),
            _rows_descriptor(x, columns, tiles.block_k),
            out,
            out if bias is None else bias,
            num_rows,
            num_outputs,
            depth,
            out.stride(0),
            BLOCK_N=tiles.block_n,
            COLUMNS=columns,
            BLOCK_K=tiles.block_k,
            STAGES=tiles.stages,
            HAS_BIAS=bias is not None,
            num_warps=4,
            maxnreg=tiles.registers,
            launch_pdl=True,
        )


def _rows_descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Boxes of some rows and columns; what lies beyond the matrix is zeros."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], _SHARED)
