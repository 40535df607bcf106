"""What scans of recurrent layers share: rows cut into blocks at fixed positions, states that pass from one to the next.

    position      0        64       128      192
    a prompt      |---------|---------|----->          blocks of 64, 64 and 40 tokens
    the same, resumed at 64 |---------|----->          its last two blocks, from the state at 64: the same bits
    resumed at 100               |----|----->          blocks of 28 and 40 tokens: equal to within rounding

A block begins at a multiple of GRID_TOKENS in its sequence, or where its row begins. What a block computes follows from
the state before it and from its own tokens, in products of one shape. So a row's outputs and states do not depend on
the rest of the batch; nor on cuts at multiples of GRID_TOKENS, and there a state can be left without cutting.
"""

import torch

from kernels._checks import check_lengths, check_tensor, num_sequences
from kernels.backend import Backend, uses_triton
from kernels.block_scan import reference
from kernels.block_scan.layers import MAX_DIM, GatedDeltaLayer, Mamba2Layer, check_gated_delta, check_mamba2
from kernels.block_scan.plan import GRID_TOKENS, ScanPlan, max_blocks
from kernels.block_scan.steps import Mamba2Steps
from kernels.errors import KernelArgumentError
from kernels.state_slots import StateSlots, check_slots

__all__ = [
    "GRID_TOKENS",
    "MAX_DIM",
    "GatedDeltaLayer",
    "Mamba2Layer",
    "Mamba2Steps",
    "ScanPlan",
    "check_gated_delta",
    "check_mamba2",
    "check_plan",
    "max_blocks",
    "plan_scan",
]


def plan_scan(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    slots: StateSlots,
    num_tokens: int,
    *,
    backend: Backend = Backend.AUTO,
) -> ScanPlan:
    """Returns the blocks of a launch, for all its layers; made on the device, without waiting for it.

    cu_seqlens_q, cu_seqlens_k int32 [num_rows + 1], as attention takes them: a row's keys less its queries are its
    first position. num_tokens bounds the queries. A snapshot must lie on the grid or at the end of its row: another one
    is refused on a CPU, and not written on a GPU.
    """
    num_rows = num_sequences(cu_seqlens_q, "cu_seqlens_q")
    check_lengths("cu_seqlens_q", cu_seqlens_q, num_rows + 1, cu_seqlens_q.device)
    check_lengths("cu_seqlens_k", cu_seqlens_k, num_rows + 1, cu_seqlens_q.device)
    check_slots(slots, num_rows, cu_seqlens_q.device)
    if num_tokens < 0:
        raise KernelArgumentError(f"num_tokens: must not be negative, got {num_tokens}")
    count = max_blocks(num_tokens, num_rows)
    plan = ScanPlan(
        cu_seqlens_q,
        slots,
        cu_blocks=cu_seqlens_q.new_zeros(num_rows + 1),
        blocks=cu_seqlens_q.new_empty(count, 2),
        leave_slot=cu_seqlens_q.new_zeros(count),
    )
    if num_rows == 0 or count == 0:
        return plan
    if uses_triton(backend, cu_seqlens_q):
        from kernels.block_scan.plan_triton import launch

        launch(cu_seqlens_k, plan)
    else:
        reference.plan_scan(cu_seqlens_k, plan)
    return plan


def check_plan(plan: ScanPlan, num_tokens: int, device: torch.device) -> None:
    """Refuses a plan of another device, or one made for fewer tokens."""
    check_tensor("plan.cu_blocks", plan.cu_blocks, (plan.num_rows + 1,), (torch.int32,), device)
    if plan.max_blocks < max_blocks(num_tokens, plan.num_rows):
        raise KernelArgumentError(f"plan: has {plan.max_blocks} blocks, too few for {num_tokens} tokens")
