"""Which slots of a pool of recurrent states a launch reads and writes: one row for each sequence of the launch.

A pool is [num_slots, ...], one state for each slot. Slots count from 1, as pages do: slot 0 belongs to nobody, and an
entry of 0 or less names no slot. So padding is zeros.

    state at the row's begin                  after `leave_tokens` of its tokens      at its end
    fresh: zeros                              to `leave_slot`                         to `working`, and to `rolling`
    else from `restore`, if it names a slot
    else from `working`
"""

from typing import NamedTuple

import torch

from kernels._checks import check_dense

__all__ = ["StateSlots", "check_slots"]


class StateSlots(NamedTuple):
    """int32 arrays on the pool's device, those of `leave_*` with an entry for each snapshot, the others for each row.

    working       where a row's state lies; a row without a slot is padding: no state is read or written for it
    restore       a snapshot from which the row begins
    fresh         not 0: the row begins a sequence, with a state of zeros
    rolling       where its last state goes, besides its working slot
    leave_row     a row
    leave_tokens  how many of its tokens, 1 to all of them, that state has seen
    leave_slot    where it goes; an entry without a slot is padding

    Within a launch no slot is written twice, and none that is written is read by another row.
    """

    working: torch.Tensor
    restore: torch.Tensor
    fresh: torch.Tensor
    rolling: torch.Tensor
    leave_row: torch.Tensor
    leave_tokens: torch.Tensor
    leave_slot: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.working.shape[0]

    @property
    def num_leaves(self) -> int:
        return self.leave_row.shape[0]


def check_slots(slots: StateSlots, num_rows: int, device: torch.device) -> None:
    """Refuses arrays that are not dense int32 of one length on `device`; which slots they name is not checked."""
    for name, array in zip(slots._fields, slots, strict=True):
        size = slots.num_leaves if name.startswith("leave") and slots.leave_row.dim() == 1 else num_rows
        check_dense(f"slots.{name}", array, (size,), (torch.int32,), device)
