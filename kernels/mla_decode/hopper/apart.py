"""Launches mla_decode's kernels for few sequences: of weights, and behind it of values."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.mla_decode.call import MlaDecodeCall
from kernels.mla_decode.hopper import WIDTH
from kernels.mla_decode.hopper.columns_kernel import sum_columns
from kernels.mla_decode.hopper.tile_kernel import weigh_latents
from kernels.mla_decode.plan import MlaDecodePlan
from kernels.mla_decode.tree_sizes import TILE
from kernels.softmax import LOG2_E

# Registers of both launches, and programs of the second one that a multiprocessor has room for.
REGISTERS, PROGRAMS = 128, 2
# Stages of the second one by its columns.
STAGES = {64: 6, 128: 4}


def launch_apart(
    call: MlaDecodeCall,
    plan: MlaDecodePlan,
    descs: tuple[TensorDescriptor, ...],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Launches what makes the weights and, behind it, what sums values with them, leaf by leaf."""
    where = (plan.items, plan.counts, call.block_tables)
    strides = (call.pages.stride(0) // WIDTH, call.block_tables.stride(0))
    shape = {
        "HEADS": plan.heads,
        "PAGE": call.pages.shape[1],
        "LEAF": plan.tree.leaf,
        "SHORT": plan.tree.short or 0,
        "TILE": TILE,
    }
    weigh_latents[(plan.programs,)](
        *descs,
        plan.weights,
        plan.tops,
        plan.tile_sums,
        *where,
        call.scale * LOG2_E,
        *strides,
        **shape,
        # Of queries and latents a program has room for three tiles.
        STAGES=3 - plan.tiles,
        num_warps=4,
        maxnreg=REGISTERS,
    )
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    columns, latents = plan.columns_apart(call.num_seqs), descs[3]
    sum_columns[(plan.programs * PROGRAMS,)](
        TensorDescriptor(plan.weights, list(plan.weights.shape), [TILE, 1], [64, TILE], layout),
        TensorDescriptor(latents.base, latents.shape, latents.strides, [latents.block_shape[0], columns], layout),
        out,
        lse if lse is not None else plan.row_max,
        plan.acc,
        plan.row_max,
        plan.row_sum,
        plan.tops,
        plan.tile_sums,
        *where,
        call.q.shape[0],
        *strides,
        **shape,
        STAGES=STAGES[columns],
        COLUMNS=columns,
        SLOT_ROWS=plan.slot_rows,
        WANTS_LSE=lse is not None,
        num_warps=4,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
