"""Rows of a launch block by block on a CPU, each from its slot and into its slots."""

from collections.abc import Callable
from itertools import pairwise

import torch

from kernels.block_scan.plan import GRID_TOKENS, ScanPlan
from kernels.state_slots.reference import initial_states, write_states


def each_block(
    states: torch.Tensor, plan: ScanPlan, out: torch.Tensor, compute: Callable[[slice, torch.Tensor], torch.Tensor]
) -> None:
    """Fills out with what `compute` returns of each block's tokens; it brings the state before them up to date."""
    slots, blocks, leave_slot = plan.slots, plan.blocks.tolist(), plan.leave_slot.tolist()
    current = initial_states(states, slots)
    for state, (begin, end) in zip(current, pairwise(plan.cu_blocks.tolist()), strict=True):
        for (first, count), slot in zip(blocks[begin:end], leave_slot[begin:end], strict=True):
            tokens = slice(first, first + count)
            out[tokens] = compute(tokens, state)
            if slot > 0:
                states[slot] = state
    write_states(states, slots.rolling.masked_fill(slots.working <= 0, 0), current)
    write_states(states, slots.working, current)


def by_head(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns [heads, GRID_TOKENS, ...] in fp32 of a block's tokens [num_tokens, its heads, ...], zeros behind them.

    Heads of a group have the same ones.
    """
    padded = rows.new_zeros((heads, GRID_TOKENS, *rows.shape[2:]), dtype=torch.float32)
    padded[:, : rows.shape[0]] = rows.transpose(0, 1).repeat_interleave(heads // rows.shape[1], dim=0)
    return padded


def decays(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns running sums of log decays [heads, n], and [heads, n, n]: what is left at i of what came at j <= i."""
    sums = g.cumsum(dim=1)
    between = sums[:, :, None] - sums[:, None, :]
    later = torch.ones(between.shape[1:], dtype=torch.bool).triu(1)
    return sums, between.masked_fill_(later, float("-inf")).exp_()
