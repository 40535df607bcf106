"""What becomes of live sequences when the session is there again: carried on, adopted, or queued again.

Knows no stream and no launch; both have come to rest before.

    the manager knows us           repeat the unanswered Step; everything goes on
    it is a new one, or forgot     what computed nothing queues again; the rest is adopted; tickets are void
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from worker_service.core.launch_plan import SchedulerConfig
from worker_service.core.outbox import Ask, Outbox
from worker_service.core.ports import (
    NO_PAGE,
    Adopt,
    Grant,
    GroupKind,
    GroupPages,
    Refusal,
    SequenceId,
    Step,
    Welcome,
)
from worker_service.core.roster import Roster
from worker_service.core.sequence import Sequence, State, place_pages


class Readmission(NamedTuple):
    """Send `repeat` again and apply its reply, or send each Adopt and hand its answer to apply_adopt."""

    repeat: Step | None
    adopts: tuple[Adopt, ...]


class Readmitter:
    def __init__(self, config: SchedulerConfig, roster: Roster, outbox: Outbox) -> None:
        self._config = config
        self._roster = roster
        self._outbox = outbox

    def readmit(self, welcome: Welcome, *, is_same_epoch: bool) -> Readmission:
        if is_same_epoch and self._is_known(welcome):
            return Readmission(self._outbox.unanswered, ())
        waiting = [asked.sequence for asked in self._outbox.asked.values() if asked.ask is Ask.ACQUIRE]
        self._outbox.reset(welcome.last_step_id, welcome.known_sequences)
        self._roster.departures.clear()
        adopts: list[Adopt] = []
        for sequence in list(self._roster.leased):
            if self._is_adoptable(sequence, welcome):
                adopts.append(self._adopt(sequence))
            else:
                self._end_lease(sequence)
                waiting.append(sequence)
        for sequence in waiting:
            if sequence.state is not State.FINISHED:
                self._roster.enqueue(sequence)
        return Readmission(None, tuple(adopts))

    def _is_known(self, welcome: Welcome) -> bool:
        """Whether the manager stands where its last reply left it, or one step further: then the reply was lost.

        That step may have ended leases: a refused replan does.
        """
        step, asked = self._outbox.unanswered, self._outbox.asked
        replanned = {sequence_id for sequence_id, entry in asked.items() if entry.ask is Ask.REPLAN}
        expected = {sequence.sequence_id for sequence in self._roster.leased} - replanned
        known = expected <= welcome.known_sequences
        return known and (step is None or welcome.last_step_id in (step.step_id - 1, step.step_id))

    def _is_adoptable(self, sequence: Sequence, welcome: Welcome) -> bool:
        """A lease that the manager has, though the dialogue lost its place, ends instead; its sequence queues."""
        is_running = sequence.state is State.RUNNING and sequence.computed_len > sequence.start_len
        return is_running and sequence.sequence_id not in welcome.known_sequences

    def _end_lease(self, sequence: Sequence) -> None:
        """To its client a lease that is lost with computed tokens is a preemption: they count on top."""
        if sequence.state is State.RUNNING and sequence.computed_len > sequence.start_len:
            sequence.num_preemptions += 1
        self._roster.end_lease(sequence)

    def _adopt(self, sequence: Sequence) -> Adopt:
        """The manager knows all tokens of it from now on, and publishes what is computed as it stands."""
        sequence.known_len = len(sequence.tokens)
        sequence.published_len = sequence.computed_len
        sequence.num_refused_extends = 0
        sequence.granted_len = sequence.computed_len
        sequence.restore = sequence.leave = ()
        return Adopt(
            sequence.sequence_id,
            sequence.namespace,
            sequence.tokens.tobytes(),
            sequence.computed_len,
            tuple(self._table(sequence, group) for group in self._config.paged_groups),
            sequence.working,
            sequence.rolling,
            sequence.request.priority,
        )

    def _table(self, sequence: Sequence, group: int) -> GroupPages:
        """A window's pages are named as far as it still reads them: those behind may be another sequence's by now."""
        spec, table = self._config.groups[group], sequence.tables[group]
        num_left = 0
        if spec.kind is GroupKind.WINDOW:
            first_read = max(sequence.computed_len - (spec.window_tokens - 1), 0)
            num_left = min(first_read // self._config.page_tokens, len(table))
        named = array("i", (NO_PAGE,)) * num_left + table[num_left:]
        return GroupPages(group, 0, named.tobytes())

    def apply_adopt(self, sequence_id: SequenceId, answer: Grant | Refusal) -> None:
        sequence = next(sequence for sequence in self._roster.leased if sequence.sequence_id == sequence_id)
        if isinstance(answer, Refusal):
            self._roster.departures.pop(sequence_id, None)
            self._end_lease(sequence)
            if sequence.state is not State.FINISHED:
                self._roster.enqueue(sequence)
            return
        for pages in answer.tables:
            del sequence.tables[pages.group][:]
        place_pages(sequence.tables, answer.tables)
        sequence.working, sequence.rolling, sequence.leave = answer.working, answer.rolling, answer.leave
