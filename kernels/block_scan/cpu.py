"""Rows of a launch block by block on a CPU, each from its slot and into its slots."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from kernels.block_scan.plan import GRID_TOKENS, SUB_TOKENS, ScanPlan
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


class KeyDecays(NamedTuple):
    """The decays of a block's tokens [heads, GRID_TOKENS], for each key channel or with one entry for all of them.

    grown      [heads, n, dk or 1]: what is left at each token of the state before the block
    kept       [heads, n, dk or 1]: what is left behind the block of what came at each token
    products   of rows and keys [heads, n, dk]: [heads, n, n], each pair by what is left at the row of that key
    """

    grown: torch.Tensor
    kept: torch.Tensor
    products: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def head_decays(g: torch.Tensor) -> KeyDecays:
    """Returns the decays of log decays [heads, n]."""
    sums, left = decays(g)
    return KeyDecays(
        sums.exp()[:, :, None], left[:, -1, :, None], lambda rows, keys: rows @ keys.transpose(1, 2) * left
    )


def channel_decays(g: torch.Tensor) -> KeyDecays:
    """Returns the decays of log decays [heads, n, dk].

    No factor is above 1, however fast a channel forgets, and none is a difference of sums, whose last digits a fast
    channel would take: sub-blocks are summed up forwards and backwards, tokens of one have a sum for each pair.
    """
    subs = g.view(g.shape[0], -1, SUB_TOKENS, g.shape[2])
    sums, behind = subs.cumsum(dim=2), _sums_after(subs, 2)
    totals = sums[:, :, -1:]
    later = torch.ones(SUB_TOKENS, SUB_TOKENS, dtype=torch.bool).triu()[:, :, None]
    # [heads, sub-block, i, j, dk]: from behind j to i.
    within = subs[:, :, :, None].expand(-1, -1, -1, SUB_TOKENS, -1).masked_fill(later, 0.0).cumsum_(dim=2).exp_()

    def products(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        a, b = rows.view_as(subs), keys.view_as(subs)
        out = rows.new_zeros(*rows.shape[:2], rows.shape[1])
        near = ((a[:, :, :, None] * b[:, :, None]).mul_(within)).sum(dim=-1).tril_()
        for sub in range(subs.shape[1]):
            first = sub * SUB_TOKENS
            own = slice(first, first + SUB_TOKENS)
            out[:, own, own] = near[:, sub]
            if sub:
                reach = b[:, :sub] * (behind[:, :sub] + _sums_after(totals[:, :sub], 1)).exp()
                out[:, own, :first] = (a[:, sub] * sums[:, sub].exp()) @ reach.flatten(1, 2).transpose(1, 2)
        return out

    grown = (sums + _sums_after(totals.flip(1), 1).flip(1)).exp()
    return KeyDecays(grown.flatten(1, 2), (behind + _sums_after(totals, 1)).exp().flatten(1, 2), products)


def _sums_after(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns for each entry the sum of those behind it."""
    ahead = values.flip(dim).narrow(dim, 0, values.shape[dim] - 1).cumsum(dim)
    return torch.cat((torch.zeros_like(values.narrow(dim, 0, 1)), ahead), dim=dim).flip(dim)
