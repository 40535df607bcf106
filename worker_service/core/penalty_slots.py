"""Slots on the device that count the tokens of sequences with penalties."""

from __future__ import annotations

from worker_service.core.sequence import NO_PENALTY_SLOT, Sequence, State


class PenaltySlots:
    """A sequence keeps its slot until it ends or loses its lease, so there are never more than may run at once."""

    def __init__(self, num_slots: int) -> None:
        self._holders: list[Sequence | None] = [None] * num_slots

    def assign(self, sequence: Sequence) -> None:
        """Gives a sequence with penalties a slot, unless it has one."""
        if sequence.penalty_slot != NO_PENALTY_SLOT or not sequence.sampling.has_penalties:
            return
        slot = next(slot for slot, holder in enumerate(self._holders) if _is_free(slot, holder))
        self._holders[slot] = sequence
        sequence.penalty_slot = slot


def _is_free(slot: int, holder: Sequence | None) -> bool:
    """A launch in flight may still count into a slot that is free; the next holder's first launch clears it."""
    return holder is None or holder.state is State.FINISHED or holder.penalty_slot != slot
