"""Who waits, who holds a lease, and whose lease is about to end; each list in queue order."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import NamedTuple

from session.words import ReleaseReason, SequenceId
from worker_service.core.sequence import QueueOrder, Sequence, State


class Departure(NamedTuple):
    """A lease to end with the next step. `publishes` is False when a failed launch put its content in doubt."""

    sequence: Sequence
    reason: ReleaseReason
    publishes: bool = True

    def rolling_tokens(self, page_tokens: int) -> int:
        """Returns the boundary whose state the sequence's rolling slots hold; 0: none of use."""
        is_aborted = self.reason is ReleaseReason.ABORTED
        return 0 if is_aborted else self.sequence.rolling_boundary(page_tokens)


def _queue_order(sequence: Sequence) -> QueueOrder:
    return sequence.queue_order


class Queues:
    def __init__(self) -> None:
        self.unfinished: dict[SequenceId, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.leased: list[Sequence] = []
        self.departures: dict[SequenceId, Departure] = {}
        # Aborted while they waited, and the cache service keeps their tokens until it is told.
        self.aborted_with_kept_prompt: list[SequenceId] = []

    def enqueue(self, sequence: Sequence) -> None:
        """Puts it at its place in the queue; a preempted sequence keeps its order, so it is near the head."""
        sequence.state = State.WAITING
        self.unfinished[sequence.sequence_id] = sequence
        insort(self.waiting, sequence, key=_queue_order)

    def take(self, chosen: Iterable[Sequence]) -> None:
        for sequence in chosen:
            sequence.state = State.ACQUIRING
            sequence.held_by = None
        self.waiting = [sequence for sequence in self.waiting if sequence.state is State.WAITING]

    def admit(self, sequence: Sequence) -> None:
        sequence.lease_number += 1
        sequence.has_lease = True
        insort(self.leased, sequence, key=_queue_order)

    def undoubted(self) -> list[Sequence]:
        """Returns the leased sequences but for those whose content a failed launch put in doubt."""
        doubtful = [departure.sequence for departure in self.departures.values() if not departure.publishes]
        return [sequence for sequence in self.leased if sequence not in doubtful]

    def end_lease(self, sequence: Sequence) -> None:
        self.leased.remove(sequence)
        sequence.forget_lease()

    def lose_lease(self, sequence: Sequence) -> None:
        """Ends a lease that the cache service no longer has.

        Computed tokens are lost, which the usage counts as a preemption.
        """
        if sequence.state in (State.RUNNING, State.ADOPTING) and sequence.has_computed:
            sequence.num_preemptions += 1
        self.end_lease(sequence)

    def preempt(self, sequence: Sequence) -> None:
        sequence.state = State.PREEMPTED
        sequence.num_preemptions += 1
        self.departures[sequence.sequence_id] = Departure(sequence, ReleaseReason.PREEMPTED)

    def finish(self, sequence: Sequence, reason: ReleaseReason, *, publishes: bool = True) -> None:
        """The request is over; a lease that it holds ends with the next step."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            if sequence.kept_prompt_len:
                self.aborted_with_kept_prompt.append(sequence.sequence_id)
        sequence.state = State.FINISHED
        self.unfinished.pop(sequence.sequence_id, None)
        if sequence.has_lease:
            self.departures[sequence.sequence_id] = Departure(sequence, reason, publishes)
