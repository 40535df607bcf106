"""Launches the Gluon kernels that solve blocks of the gated delta rule."""

import torch
import triton

from kernels.block_scan import GRID_TOKENS, GatedDeltaLayer, ScanPlan
from kernels.block_scan.call import BlockScan
from kernels.block_scan.hopper.launch import boxes_of
from kernels.device import num_multiprocessors
from kernels.gated_delta_scan.channels.triton import Decayed
from kernels.gated_delta_scan.channels.triton import solve as solve_channels_of_any_length
from kernels.gated_delta_scan.hopper.channels import solve_channels
from kernels.gated_delta_scan.hopper.few_channels import PARTS, solve_few_channels
from kernels.gated_delta_scan.hopper.kernel import solve_blocks
from kernels.gated_delta_scan.triton import Solved

# Of a thread at most, so that four programs share a processor: 8,192 tokens on an H200 take 357 us, scan included, and
# 366 with the 158 that it would have.
REGISTERS = 128
# Programs of solve_few_channels that a multiprocessor holds at once.
FEW_AT_ONCE = 2
# The most programs of it for each multiprocessor. Those behind the last block only end, in 8 waves at most, while the
# first ones work. 0: it is never launched.
FEW_PROGRAMS = 16


def solve(layer: GatedDeltaLayer, plan: ScanPlan) -> BlockScan:
    """Returns the plain scan that a layer is."""
    if not layer.by_channel:
        return _solve_heads(layer, plan)
    # Keys of any length may be more than fp16 holds.
    return solve_channels_of_any_length(layer, plan) if layer.norm_eps is None else _solve_channels(layer, plan)


def is_few(tokens: int, heads: int, max_blocks: int, processors: int) -> bool:
    """Returns whether blocks may be so few that two programs for each, and for each head, are on the card at once.

    How many there are is not known here: at least those that hold `tokens`, at most `max_blocks`.
    """
    least = triton.cdiv(tokens, GRID_TOKENS)
    is_possible = PARTS * least * heads <= FEW_AT_ONCE * processors
    return is_possible and PARTS * max_blocks * heads <= FEW_PROGRAMS * processors


def _solve_channels(layer: GatedDeltaLayer, plan: ScanPlan) -> BlockScan:
    """The same of normed keys with a decay for each channel."""
    decayed = Decayed.empty(layer, plan)
    heads, (k_heads, dim_k) = layer.v.shape[1], layer.k.shape[1:]
    given = (
        boxes_of(layer.q, dim_k), boxes_of(layer.k, dim_k), layer.g, layer.beta, decayed.inverses, decayed.scores,
        decayed.reading, decayed.keys, decayed.kept, decayed.remains, plan.cu_blocks, plan.blocks, plan.num_rows,
        layer.norm_eps, layer.g.stride(0), layer.beta.stride(0),
    )  # fmt: skip
    sizes = {"HEADS": heads, "GROUP": heads // k_heads, "DK": dim_k}
    processors = num_multiprocessors(layer.v.device)
    with torch.cuda.device_of(layer.v):
        if is_few(layer.v.shape[0], heads, plan.max_blocks, processors):
            solve_few_channels[(PARTS * heads, plan.max_blocks)](
                *given, **sizes, AT_ONCE=FEW_AT_ONCE * processors, num_warps=4, launch_pdl=True
            )
        else:
            solve_channels[(plan.max_blocks * heads,)](*given, **sizes, num_warps=4, launch_pdl=True)
    return decayed.scan(layer, plan)


def _solve_heads(layer: GatedDeltaLayer, plan: ScanPlan) -> BlockScan:
    """The same of normed keys with a decay for each head."""
    solved = Solved.empty(layer)
    dim_k = layer.k.shape[2]
    with torch.cuda.device_of(layer.v):
        solve_blocks[(plan.max_blocks * layer.v.shape[1],)](
            boxes_of(layer.q, dim_k), boxes_of(layer.k, dim_k), layer.g, layer.beta, solved.inverses, solved.scores,
            solved.sums, solved.lengths, plan.cu_blocks, plan.blocks, plan.num_rows, layer.norm_eps,
            layer.g.stride(0), layer.beta.stride(0), solved.sums.numel(),
            HEADS=layer.v.shape[1], GROUP=layer.v.shape[1] // layer.k.shape[1], DK=dim_k, num_warps=4,
            maxnreg=REGISTERS, launch_pdl=True,
        )  # fmt: skip
    return solved.scan(layer, plan)
