"""How a launch's rows are cut into blocks at fixed positions, and behind which of them a state is left."""

from typing import NamedTuple

import torch

from kernels.state_slots import StateSlots

# Positions at which blocks begin are multiples of this.
GRID_TOKENS = 64
# On a CPU: tokens of a sub-block, within which decays of key channels are taken pair by pair.
SUB_TOKENS = 16


class ScanPlan(NamedTuple):
    """Blocks of a launch, row after row; all tensors are int32.

    cu_seqlens_q  [num_rows + 1]
    slots         where its rows' states lie
    cu_blocks     [num_rows + 1]: running sums of each row's blocks; a padding row has none
    blocks        [max_blocks, 2]: of each block its first token and how many it has, 1 to GRID_TOKENS; the places
                  behind the last block are not written
    leave_slot    [max_blocks]: where the state behind a block goes besides, 0 if nowhere
    """

    cu_seqlens_q: torch.Tensor
    slots: StateSlots
    cu_blocks: torch.Tensor
    blocks: torch.Tensor
    leave_slot: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.slots.num_rows

    @property
    def max_blocks(self) -> int:
        return self.blocks.shape[0]


def max_blocks(num_tokens: int, num_rows: int) -> int:
    """Returns the most blocks that rows of `num_tokens` tokens together can have: each begins and ends anywhere."""
    return min(num_tokens, (num_tokens + num_rows * 2 * (GRID_TOKENS - 1)) // GRID_TOKENS)
