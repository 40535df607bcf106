"""Slots of recurrent states in plain torch."""

import torch

from kernels.state_slots import StateSlots


def source_slots(slots: StateSlots) -> torch.Tensor:
    """Returns for each row the slot that it begins from, int64; 0: from zeros, or the row is padding."""
    source = torch.where(slots.restore > 0, slots.restore, slots.working)
    return source.masked_fill((slots.fresh != 0) | (slots.working <= 0), 0).clamp_min(0).long()


def initial_states(pool: torch.Tensor, slots: StateSlots) -> torch.Tensor:
    """Returns a copy of each row's state at its begin, [num_rows, ...]."""
    source = source_slots(slots)
    states = pool[source]
    states[source == 0] = 0
    return states


def write_states(pool: torch.Tensor, targets: torch.Tensor, states: torch.Tensor) -> None:
    """Writes the states of the rows whose target names a slot."""
    named = targets > 0
    pool[targets[named].long()] = states[named]
