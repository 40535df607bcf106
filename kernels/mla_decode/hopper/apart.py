"""Launches mla_decode's kernels for few sequences: of scores, and behind it of softmax and values."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.mla_decode.call import MlaDecodeCall
from kernels.mla_decode.hopper import WIDTH
from kernels.mla_decode.hopper.score_kernel import score_tiles
from kernels.mla_decode.hopper.weigh_kernel import weigh_values
from kernels.mla_decode.plan import MlaDecodePlan
from kernels.mla_decode.tree_sizes import TILE
from kernels.softmax import LOG2_E

# Registers of both launches; of the second one columns, as many as a box of rotary parts has, stages, and programs a
# multiprocessor.
REGISTERS, COLUMNS, STAGES, PROGRAMS = 128, 64, 4, 2


def launch_apart(
    call: MlaDecodeCall,
    plan: MlaDecodePlan,
    descs: tuple[TensorDescriptor, ...],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Launches what makes the scores and, behind it, what makes values of them, leaf by leaf."""
    where = (plan.items, plan.counts, call.block_tables)
    strides = (call.pages.stride(0) // WIDTH, call.block_tables.stride(0))
    shape = {"HEADS": plan.heads, "PAGE": call.pages.shape[1], "LEAF": plan.tree.leaf, "TILE": TILE}
    score_tiles[(plan.programs,)](
        *descs,
        plan.scores,
        *where,
        *strides,
        **shape,
        # Of queries and latents a program has room for three tiles.
        STAGES=3 - plan.tiles,
        num_warps=4,
        maxnreg=REGISTERS,
    )
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    scores = plan.scores.view(-1, 32)
    weigh_values[(plan.programs * PROGRAMS,)](
        TensorDescriptor(scores, list(scores.shape), [32, 1], [64 * TILE // 32, 32], layout),
        descs[3],
        out,
        lse if lse is not None else plan.row_max,
        plan.acc,
        plan.row_max,
        plan.row_sum,
        *where,
        call.scale * LOG2_E,
        call.q.shape[0],
        *strides,
        **shape,
        STAGES=STAGES,
        COLUMNS=COLUMNS,
        SLOT_ROWS=plan.slot_rows,
        WANTS_LSE=lse is not None,
        num_warps=4,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
