"""The plan of a scan in plain Python: one block after the other."""

import torch

from kernels.block_scan.plan import GRID_TOKENS, ScanPlan
from kernels.errors import KernelArgumentError


def plan_scan(cu_seqlens_k: torch.Tensor, plan: ScanPlan) -> None:
    """Fills the plan; waits for the device where the lengths are not on the CPU."""
    begins, keys = plan.cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    cu_blocks, blocks, ends = [0], [], []
    for row, is_real in enumerate((plan.slots.working > 0).tolist()):
        begin, end = begins[row], begins[row + 1]
        first = begin
        while is_real and first < end:
            position = keys[row] - (end - first)
            count = min(GRID_TOKENS - position % GRID_TOKENS, end - first)
            blocks.append((first, count))
            first += count
            ends.append((row, first - begin))
        cu_blocks.append(len(blocks))
    plan.cu_blocks.copy_(torch.tensor(cu_blocks, dtype=torch.int32))
    plan.blocks[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32).view(-1, 2)
    for row, tokens, slot in zip(*(array.tolist() for array in plan.slots[-3:]), strict=True):
        if slot > 0 and cu_blocks[row] < cu_blocks[row + 1]:
            if (row, tokens) not in ends:
                raise KernelArgumentError(
                    f"slots.leave_tokens: {tokens} of row {row} end no block of {GRID_TOKENS} positions, nor the row"
                )
            plan.leave_slot[ends.index((row, tokens))] = slot
