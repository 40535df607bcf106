"""Which state slots a launch reads and writes, for each STATE group, as flat arrays beside its batch.

row     working      restore            fresh          leave                         rolling
chunk   its slot     a snapshot to      starts at      the state at some of its      -
                     begin from, or 0   position 0     boundaries goes to slots
decode  its slot     0                  0              -                             where the state goes when the
                                                                                     row's token ends a page, or 0
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from session.words import GroupKind, GroupSpec, StateSlot
from worker_service.core.launch_plan import Row

# No slot: slots of a pool count from 1.
NO_STATE_SLOT = 0


@dataclass(frozen=True, slots=True)
class StateRows:
    """One STATE group's slots; arrays are 'i', with an entry for each row but for the three `leave_*`.

    leave_row, leave_tokens, leave_slot    a row, how many of its tokens the state has seen, and where that state goes
    """

    working: array[int]
    restore: array[int]
    fresh: array[int]
    rolling: array[int]
    leave_row: array[int]
    leave_tokens: array[int]
    leave_slot: array[int]

    def part(self, first: int, end: int) -> StateRows:
        """Returns the rows [first, end)."""
        left = [at for at, row in enumerate(self.leave_row) if first <= row < end]
        return StateRows(
            self.working[first:end],
            self.restore[first:end],
            self.fresh[first:end],
            self.rolling[first:end],
            array("i", [self.leave_row[at] - first for at in left]),
            array("i", [self.leave_tokens[at] for at in left]),
            array("i", [self.leave_slot[at] for at in left]),
        )


def state_rows(
    rows: Seq[Row], num_decode_seqs: int, groups: Seq[GroupSpec], page_tokens: int
) -> tuple[StateRows | None, ...]:
    """Returns an entry for each group, None for one with pages; of a model without states nothing."""
    if all(group.kind is not GroupKind.STATE for group in groups):
        return ()
    return tuple(
        _of_group(rows, num_decode_seqs, group, page_tokens) if spec.kind is GroupKind.STATE else None
        for group, spec in enumerate(groups)
    )


def _of_group(rows: Seq[Row], num_decode_seqs: int, group: int, page_tokens: int) -> StateRows:
    left = [
        (index, slot.boundary_tokens - row.first_token, slot.slot)
        for index, row in enumerate(rows)
        for slot in row.sequence.snapshots
        if slot.group == group and row.first_token < slot.boundary_tokens <= row.end
    ]
    decoded = [
        NO_STATE_SLOT if row.end % page_tokens else _slot(row.sequence.rolling, group) for row in rows[:num_decode_seqs]
    ]
    return StateRows(
        working=array("i", [_slot(row.sequence.working, group) for row in rows]),
        restore=array("i", [_slot(row.sequence.restore, group) if _resumes(row) else NO_STATE_SLOT for row in rows]),
        fresh=array("i", [row.first_token == 0 for row in rows]),
        rolling=array("i", [*decoded, *(NO_STATE_SLOT for _ in rows[num_decode_seqs:])]),
        leave_row=array("i", [row for row, _, _ in left]),
        leave_tokens=array("i", [tokens for _, tokens, _ in left]),
        leave_slot=array("i", [slot for _, _, slot in left]),
    )


def _resumes(row: Row) -> bool:
    """Returns whether the row is its sequence's first since it got its lease, behind a cached prefix."""
    return 0 < row.first_token == row.sequence.start_len


def _slot(slots: Seq[StateSlot], group: int) -> int:
    return next((slot.slot for slot in slots if slot.group == group), NO_STATE_SLOT)
