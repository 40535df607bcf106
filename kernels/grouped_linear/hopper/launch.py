"""Launches grouped_linear's Gluon kernel, with a descriptor of the stored values."""

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.grouped_linear.hopper import tile_for
from kernels.grouped_linear.hopper.kernel import multiply_stored
from kernels.grouped_linear.plan import ExpertPlan
from kernels.grouped_linear.stored import Fp8Experts
from kernels.grouped_linear.words import BLOCK, ExpertWords, Mxfp4Words


def launch(
    x: torch.Tensor, weight: Fp8Experts | ExpertWords, bias: torch.Tensor | None, plan: ExpertPlan, out: torch.Tensor
) -> None:
    """Fills out; arguments that `reason_against` has nothing against."""
    values, scales = weight[:2]
    is_mxfp4, num_outputs, tile = isinstance(weight, Mxfp4Words), out.shape[1], tile_for(weight, plan.tile_rows)
    num_blocks = triton.cdiv(num_outputs, tile.block_n)
    columns = tile.step
    if not isinstance(weight, Fp8Experts):
        # The descriptor has a row for each one of a block, whose columns are words.
        values = values.flatten(1, 3)
        columns = tile.step * values.shape[2] // BLOCK
    with torch.cuda.device_of(x):
        multiply_stored[(plan.tiles.shape[0] * num_blocks,)](
            _values_descriptor(values, tile.block_n, columns),
            x,
            scales,
            x if bias is None else bias,
            *plan[:4],
            out,
            plan.num_pairs,
            num_outputs,
            num_blocks,
            x.shape[1],
            values.stride(0) // values.stride(1),
            x.stride(0),
            scales.stride(0),
            scales.stride(1),
            0 if bias is None else bias.stride(0),
            PAIRS_OF_ROW=plan.num_pairs // x.shape[0],
            TILE_ROWS=plan.tile_rows,
            BLOCK_N=tile.block_n,
            STEP=tile.step,
            STAGES=tile.stages,
            HAS_BIAS=bias is not None,
            IS_MXFP4=is_mxfp4,
            num_warps=4,
            launch_pdl=True,
        )


def _values_descriptor(values: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The rows of all experts as one matrix; what lies beyond the last row or a row's end is zeros."""
    experts, outputs, width = values.shape
    expert_stride, row_stride, _ = values.stride()
    all_rows, size = (experts - 1) * (expert_stride // row_stride) + outputs, values.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=min(columns * size, 128), element_bitwidth=8 * size, rank=2)
    return TensorDescriptor(values, [all_rows, width], [row_stride, 1], [rows, columns], layout)
