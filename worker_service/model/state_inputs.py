"""What a launch's layers read of its states: the slots of its rows, as arrays for the upload and on the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.state_slots import StateSlots
from worker_service.core.batch import Batch
from worker_service.core.state_rows import NO_SLOT, StateRows
from worker_service.model.staging import HostArray, padded

# Of StateSlots, those with an entry for each row; the others have one for each snapshot.
ROW_FIELDS = ("working", "restore", "fresh", "rolling")
NO_ROWS = StateRows(*(array("i") for _ in StateSlots._fields))


class StateInputs(NamedTuple):
    """The slots of each STATE group, None for a group with pages, and where each row's tokens begin.

    cu_seqlens_q   int32 [num_rows + 1]: all rows of the launch, those that decode first
    """

    cu_seqlens_q: torch.Tensor
    slots: tuple[StateSlots | None, ...]

    def part(self, num_rows: int, num_leaves: int) -> StateInputs:
        """Returns the first entries, of arrays of fixed sizes."""
        return StateInputs(
            self.cu_seqlens_q[: num_rows + 1],
            tuple(entry and _part(entry, num_rows, num_leaves) for entry in self.slots),
        )


class RowPlaces(NamedTuple):
    """Where rows lie in arrays: the first `num_decode` at the front, the others behind `decode_rows` places.

    The sizes are those of fixed arrays; 0: as many as there are.
    """

    num_decode: int = 0
    decode_rows: int = 0
    num_rows: int = 0
    num_leaves: int = 0

    @property
    def shift(self) -> int:
        return self.decode_rows - self.num_decode

    def spread(self, values: array[int]) -> array[int]:
        """Returns an entry for each place; those between and behind the rows name no slot."""
        padding = array("i", (NO_SLOT,)) * self.shift
        return padded(values[: self.num_decode] + padding + values[self.num_decode :], self.num_rows, NO_SLOT)

    def sums(self, cu_seqlens_q: array[int]) -> array[int]:
        """Returns the running sums of all places: one token in each of the front, none behind the rows."""
        between = range(self.num_decode, self.decode_rows)
        behind = (end + self.shift for end in cu_seqlens_q[self.num_decode :])
        sums = cu_seqlens_q[: self.num_decode] + array("i", [*between, *behind])
        return padded(sums, self.num_rows + 1, sums[-1])

    def place(self, row: int) -> int:
        return row if row < self.num_decode else row + self.shift


def state_arrays(batch: Batch, places: RowPlaces) -> list[HostArray]:
    """Returns what `state_inputs` makes its tensors of; nothing for a model without states."""
    present = [rows for rows in batch.states if rows is not None]
    return _arrays(present, batch.cu_seqlens_q, places) if present else []


def padding_arrays(num_groups: int, places: RowPlaces) -> list[HostArray]:
    """Returns arrays of the same sizes that name no slot, for that many STATE groups."""
    return _arrays([NO_ROWS] * num_groups, array("i", (0,)), places) if num_groups else []


def state_inputs(has_states: Sequence[bool], tensors: Sequence[torch.Tensor]) -> StateInputs | None:
    """Returns the launch's states of the tensors that `state_arrays` became; `has_states` by group."""
    if not tensors:
        return None
    left = iter(tensors)
    sums = next(left)
    return StateInputs(
        sums, tuple(StateSlots(*(next(left) for _ in StateSlots._fields)) if has else None for has in has_states)
    )


def _arrays(groups: Sequence[StateRows], cu_seqlens_q: array[int], places: RowPlaces) -> list[HostArray]:
    arrays: list[HostArray] = [places.sums(cu_seqlens_q)]
    for rows in groups:
        arrays += [places.spread(getattr(rows, name)) for name in ROW_FIELDS]
        leave_row = array("i", map(places.place, rows.leave_row))
        arrays += [padded(leave, places.num_leaves, 0) for leave in (leave_row, rows.leave_tokens, rows.leave_slot)]
    return arrays


def _part(slots: StateSlots, num_rows: int, num_leaves: int) -> StateSlots:
    sizes = {name: num_rows if name in ROW_FIELDS else num_leaves for name in StateSlots._fields}
    return StateSlots(*(values[: sizes[name]] for name, values in zip(StateSlots._fields, slots, strict=True)))
