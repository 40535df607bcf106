"""Applies a reply: pages to tables, sequences to their next state, preemption when pages ran out.

Knows no budget and no batch; it composes nothing for the wire.

Why this ends: an extend that was refused asks first in the next step; refused again, the youngest younger sequence goes
back to the queue, one for each reply, and when none is younger, the sequence itself. The oldest never goes, so it
finishes, and then the next one is the oldest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from worker_service.core.outbox import Ask, Asked, Outbox
from worker_service.core.ports import (
    Grant,
    Refusal,
    RefusalReason,
    ReleaseReason,
    Remap,
    SequenceId,
    StepReply,
    Transfer,
)
from worker_service.core.roster import Roster
from worker_service.core.sequence import Sequence, State, place_pages

# Refusals in a row after which an extend costs somebody their place.
PATIENCE = 2


class UnaskedReply(Exception):
    """The cache service answered something else than the step that it was asked."""


class Fetch(NamedTuple):
    """Start this transfer and report its ack, whatever becomes of the sequence: the ticket pins pages until then."""

    sequence_id: SequenceId
    transfer: Transfer


class Failed(NamedTuple):
    """A request that can never run; it is forgotten already."""

    sequence_id: SequenceId
    detail: str


class Effects(NamedTuple):
    fetches: tuple[Fetch, ...]
    failed: tuple[Failed, ...]


class Inbox:
    def __init__(self, roster: Roster, outbox: Outbox) -> None:
        self._roster = roster
        self._outbox = outbox

    def apply(self, reply: StepReply) -> Effects:
        """Remaps first: they concern pages from before, and what they freed may be granted in the same reply."""
        step = self._outbox.unanswered
        if step is None or step.step_id != reply.step_id:
            raise UnaskedReply(f"step {reply.step_id} is answered, not {step and step.step_id}")
        asked = self._outbox.answered()
        fetches: list[Fetch] = []
        failed: list[Failed] = []
        for remap in reply.remaps:
            self._remap(remap)
        for pages in reply.extends:
            sequence, _, length = _answered(asked, pages.sequence_id)
            place_pages(sequence.tables, pages.pages)
            sequence.granted_len = max(sequence.granted_len, length)
            sequence.leave += pages.leave
            sequence.num_refused_extends = 0
        for grant in reply.grants:
            fetches += self._grant(grant, _answered(asked, grant.sequence_id))
        for refusal in reply.refusals:
            failed += self._refuse(_answered(asked, refusal.sequence_id), refusal)
        for left in asked.values():  # an answer that is missing grants nothing
            failed += self._refuse(left, Refusal(left.sequence.sequence_id, RefusalReason.NO_ROOM, "unanswered"))
        self._preempt()
        return Effects(tuple(fetches), tuple(failed))

    def _remap(self, remap: Remap) -> None:
        sequence = self._roster.unfinished.get(remap.sequence_id)
        if sequence is not None and sequence.leased:
            place_pages(sequence.tables, remap.pages)
        self._outbox.freed()

    def _grant(self, grant: Grant, asked: Asked) -> Iterable[Fetch]:
        """After an abort the lease exists nevertheless: it ends with the next step, and its ticket wants an ack."""
        sequence = asked.sequence
        if not sequence.leased:
            self._roster.admit(sequence)
        take_pages(sequence, grant)
        sequence.granted_len = grant.usable_tokens + asked.length
        if sequence.state is State.FINISHED:
            self._roster.finish(sequence, ReleaseReason.ABORTED)
        else:
            sequence.state = State.RUNNING if grant.fetch is None else State.FETCHING
        if grant.fetch is None:
            return ()
        # An aborted sequence's too: its ack must not come before its release, or it would be granted pages anew.
        self._outbox.tickets[grant.fetch.ticket] = sequence
        return (Fetch(sequence.sequence_id, grant.fetch),)

    def _refuse(self, asked: Asked, refusal: Refusal) -> Iterable[Failed]:
        sequence = asked.sequence
        if asked.ask is Ask.REPLAN and sequence.leased:  # a refused replan ends the lease
            self._roster.departures.pop(sequence.sequence_id, None)
            self._roster.end_lease(sequence)
        if sequence.state is State.FINISHED:
            return ()
        if refusal.reason is RefusalReason.NEVER_FITS:
            self._roster.finish(sequence, ReleaseReason.ABORTED)
            return (Failed(sequence.sequence_id, refusal.detail),)
        if asked.ask is Ask.EXTEND:
            sequence.num_refused_extends += 1
        else:
            self._roster.enqueue(sequence)
            if asked.ask is Ask.ACQUIRE:  # a refused replan freed its own pages, and the step's releases came after it
                self._outbox.refused(sequence)
        return ()

    def _preempt(self) -> None:
        """The youngest: it is younger than every starving one, or starves itself. At most one for each reply, and none
        while the pages of another are on their way."""
        leased = self._roster.leased
        if self._roster.departures or len(leased) < 2:
            return
        if any(sequence.num_refused_extends >= PATIENCE for sequence in leased):
            self._roster.preempt(leased[-1])


def _answered(asked: dict[SequenceId, Asked], sequence_id: SequenceId) -> Asked:
    if sequence_id not in asked:
        raise UnaskedReply(f"the reply answers for sequence {sequence_id}, for which nothing was asked")
    return asked.pop(sequence_id)


def take_pages(sequence: Sequence, grant: Grant) -> None:
    """The launch starts where the cached prefix ends.

    Counters stay once something was computed: what is cached after a preemption is the request's own work."""
    for table in sequence.tables:
        del table[:]
    place_pages(sequence.tables, grant.tables)
    usable = grant.usable_tokens
    sequence.start_len = sequence.computed_len = sequence.launched_len = sequence.published_len = usable
    sequence.in_prefill_until = len(sequence.tokens)
    sequence.restore, sequence.leave = grant.restore, grant.leave
    sequence.working, sequence.rolling = grant.working, grant.rolling
    if not sequence.computed_tokens:
        sequence.cached_tokens, sequence.fetched_tokens = grant.cached_tokens, grant.fetched_tokens
