"""Updates of states in plain torch: each row's tokens one after the other, in fp32; what a CPU serves with."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from kernels.block_scan import GatedDeltaLayer, Mamba2Layer
from kernels.block_scan.tokens import delta_tokens, ssd_tokens
from kernels.state_slots import StateSlots
from kernels.state_slots.reference import initial_states, write_states


def update_gated_delta(
    layer: GatedDeltaLayer, cu_seqlens_q: torch.Tensor, slots: StateSlots, out: torch.Tensor
) -> None:
    """Fills out and writes the states."""
    _each_row(layer.states, cu_seqlens_q, slots, out, partial(delta_tokens, layer))


def update_mamba2(layer: Mamba2Layer, cu_seqlens_q: torch.Tensor, slots: StateSlots, out: torch.Tensor) -> None:
    """Fills out and writes the states."""
    _each_row(layer.states, cu_seqlens_q, slots, out, partial(ssd_tokens, layer))


def _each_row(
    states: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    slots: StateSlots,
    out: torch.Tensor,
    compute: Callable[[slice, torch.Tensor], torch.Tensor],
) -> None:
    """`compute` returns a row's outputs and brings its state up to date."""
    begins, current = cu_seqlens_q.tolist(), initial_states(states, slots)
    is_real = (slots.working > 0).tolist()
    for row, (begin, end) in enumerate(pairwise(begins)):
        tokens = slice(begin, end)
        out[tokens] = compute(tokens, current[row]) if is_real[row] else 0.0
    out[begins[-1] :] = 0.0
    write_states(states, slots.rolling.masked_fill(slots.working <= 0, 0), current)
    write_states(states, slots.working, current)
