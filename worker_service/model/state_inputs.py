"""What a launch's layers read of its states: the slots of its rows, as arrays for the upload and on the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.state_slots import StateSlots
from worker_service.core.batch import Batch
from worker_service.core.state_rows import NO_STATE_SLOT
from worker_service.model.staging import HostArray, HostView, padded, put

# Of StateSlots, those with an entry for each row; the others have one for each snapshot.
ROW_FIELDS = ("working", "restore", "fresh", "rolling")


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
    """Where rows lie in fixed arrays: the first `num_decode` at the front, the others behind `decode_rows` places."""

    num_decode: int
    decode_rows: int

    @property
    def shift(self) -> int:
        return self.decode_rows - self.num_decode

    def put(self, values: array[int], target: HostView) -> None:
        """Writes the rows' values to their places; those between and behind them stay as they are."""
        put(values[: self.num_decode], target)
        put(values[self.num_decode :], target, self.decode_rows)

    def sums(self, cu_seqlens_q: array[int]) -> array[int]:
        """Returns where each place's tokens begin, and where those of the last row end; each place at the front has one
        token."""
        between = range(self.num_decode, self.decode_rows)
        behind = (end + self.shift for end in cu_seqlens_q[self.num_decode :])
        return cu_seqlens_q[: self.num_decode] + array("i", [*between, *behind])

    def of(self, rows: array[int]) -> array[int]:
        """Returns the place of each of these rows."""
        return array("i", [row if row < self.num_decode else row + self.shift for row in rows])


def state_arrays(batch: Batch) -> list[HostArray]:
    """Returns what `state_inputs` makes its tensors of; nothing for a model without states."""
    present = [rows for rows in batch.states if rows is not None]
    if not present:
        return []
    return [batch.cu_seqlens_q, *(getattr(rows, name) for rows in present for name in StateSlots._fields)]


def padding_arrays(num_groups: int, num_rows: int, num_leaves: int) -> list[HostArray]:
    """Returns arrays of fixed sizes that name no slot, for that many STATE groups; of none nothing."""
    if not num_groups:
        return []
    group = [array("i", (NO_STATE_SLOT,)) * num_rows for _ in ROW_FIELDS]
    # Of what is left nowhere, the row and the tokens are 0.
    group += [array("i", (value,)) * num_leaves for value in (0, 0, NO_STATE_SLOT)]
    return [array("i", (0,)) * (num_rows + 1), *group * num_groups]


def put_states(batch: Batch, places: RowPlaces, targets: Sequence[HostView]) -> None:
    """Writes the launch's states into what `padding_arrays` became."""
    if not targets:
        return
    put_sums(places.sums(batch.cu_seqlens_q), targets[0])
    left = iter(targets[1:])
    for rows in batch.states:
        if rows is None:
            continue
        for name in ROW_FIELDS:
            places.put(getattr(rows, name), next(left))
        for leave in (places.of(rows.leave_row), rows.leave_tokens, rows.leave_slot):
            put(leave, next(left))


def put_sums(sums: array[int], target: HostView) -> None:
    """Writes running sums, and the last one in all entries behind them: no tokens there."""
    put(padded(sums, len(target), sums[-1]), target)


def state_inputs(has_states: Sequence[bool], tensors: Sequence[torch.Tensor]) -> StateInputs | None:
    """Returns the launch's states of the tensors that `state_arrays` became; `has_states` by group."""
    if not tensors:
        return None
    left = iter(tensors)
    sums = next(left)
    return StateInputs(
        sums, tuple(StateSlots(*(next(left) for _ in StateSlots._fields)) if has else None for has in has_states)
    )


def _part(slots: StateSlots, num_rows: int, num_leaves: int) -> StateSlots:
    sizes = {name: num_rows if name in ROW_FIELDS else num_leaves for name in StateSlots._fields}
    return StateSlots(*(values[: sizes[name]] for name, values in zip(StateSlots._fields, slots, strict=True)))
