"""Applies a reply: pages to tables, sequences to their next state. Who is preempted is decided in preemption.py."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from session.messages import Grant, Refusal, Remap, StepReply
from session.words import RefusalReason, ReleaseReason, SequenceId, Transfer
from worker_service.core.admission import Admission
from worker_service.core.adoption import take_over
from worker_service.core.asked import Ask, Asked
from worker_service.core.errors import UnaskedReply
from worker_service.core.inventory_recorder import Recorder
from worker_service.core.preemption import preempt
from worker_service.core.queues import Queues
from worker_service.core.running_pages import RunningPages
from worker_service.core.sequence import NO_MATCH, Sequence, State, place_pages
from worker_service.core.step_builder import StepBuilder

_FINAL = (RefusalReason.NEVER_FITS, RefusalReason.INVALID)


class Fetch(NamedTuple):
    """A transfer to start. Its ack is reported also when the sequence ends: the ticket pins pages until then."""

    sequence_id: SequenceId
    transfer: Transfer


class Failed(NamedTuple):
    """A request that can never run, and the field of it that says why; it is forgotten already."""

    sequence_id: SequenceId
    detail: str
    field: str = "prompt"


class Applied(NamedTuple):
    fetches: tuple[Fetch, ...]
    failed: tuple[Failed, ...]


class ReplyHandler:
    def __init__(
        self,
        queues: Queues,
        steps: StepBuilder,
        admission: Admission,
        running_pages: RunningPages,
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._queues = queues
        self._steps = steps
        self._admission = admission
        self._running_pages = running_pages

    def apply(self, reply: StepReply) -> Applied:
        """Applies a reply. Remaps come first: they concern pages from before, and what they freed may be granted in
        it."""
        self._check(reply)
        asked = self._steps.take_asked()
        self._running_pages.replied(reply.free_pages)
        fetches: list[Fetch] = []
        failed: list[Failed] = []
        for remap in reply.remaps:
            self._remap(remap)
        self._recorder.answered(reply.remaps)
        for extend in reply.extends:
            self._recorder.extended(extend)
            entry = asked.pop(extend.sequence_id)
            sequence = entry.sequence
            place_pages(sequence.tables, extend.pages)
            sequence.granted_len = max(sequence.granted_len, entry.length)
            sequence.snapshots += extend.snapshots
            sequence.num_refused_extends = 0
        for grant in reply.grants:
            fetches += self._grant(grant, asked.pop(grant.sequence_id))
        for refusal in reply.refusals:
            failed += self._refuse(asked.pop(refusal.sequence_id, None), refusal)
        for left in asked.values():  # what the reply left out is refused
            failed += self._refuse(left, Refusal(left.sequence.sequence_id, RefusalReason.NO_ROOM, "unanswered"))
            left.sequence.kept_prompt_len = 0
        preempt(self._queues)
        return Applied(tuple(fetches), tuple(failed))

    def _check(self, reply: StepReply) -> None:
        """Raises UnaskedReply when it is to another step, or names a sequence for which nothing was asked."""
        step, asked = self._steps.unanswered, self._steps.asked
        if step is None or step.step_id != reply.step_id:
            raise UnaskedReply(f"the reply is to step {reply.step_id}, not {step and step.step_id}")
        extended = {sequence_id for sequence_id, entry in asked.items() if entry.ask is Ask.EXTEND}
        said = (*step.publishes, *step.releases, *step.shrinks)
        named = {item.sequence_id for item in said} | asked.keys()
        _require_each_once("extends", [extend.sequence_id for extend in reply.extends], extended)
        _require_each_once("grants", [grant.sequence_id for grant in reply.grants], asked.keys() - extended)
        for refusal in reply.refusals:
            if refusal.sequence_id not in (named if refusal.reason is RefusalReason.INVALID else asked):
                raise UnaskedReply(f"sequence {refusal.sequence_id} is refused, for which nothing was asked")

    def _remap(self, remap: Remap) -> None:
        sequence = self._queues.unfinished.get(remap.sequence_id)
        if sequence is not None and sequence.has_lease:
            place_pages(sequence.tables, remap.pages)
        self._admission.freed()

    def _grant(self, grant: Grant, asked: Asked) -> Iterable[Fetch]:
        """Applies a grant, also for an aborted sequence: its lease ends with the next step, and its ticket needs an
        ack."""
        sequence = asked.sequence
        if asked.ask is Ask.ADOPT:
            take_over(sequence, grant)
            return ()
        self._recorder.granted(grant)
        if asked.ask is Ask.ACQUIRE:
            self._admission.granted()
        if not sequence.has_lease:
            self._queues.admit(sequence)
        take_pages(sequence, grant)
        if asked.ask is Ask.REPLAN:
            self._recorder.fetched(sequence, grant)
        sequence.granted_len = grant.usable_tokens + asked.length
        if sequence.state is State.FINISHED:
            self._queues.finish(sequence, ReleaseReason.ABORTED)
        else:
            sequence.state = State.FETCHING if grant.fetches else State.RUNNING
        # An aborted sequence's too: its acks must not come before its release, or it would be granted pages anew.
        self._steps.tickets.update((fetch.ticket, sequence) for fetch in grant.fetches)
        return [Fetch(sequence.sequence_id, fetch) for fetch in grant.fetches]

    def _refuse(self, asked: Asked | None, refusal: Refusal) -> Iterable[Failed]:
        if asked is None or asked.ask is Ask.EXTEND:
            return self._refuse_running(asked, refusal)
        sequence = asked.sequence
        if sequence.has_lease:  # a replan or an adopt that is refused leaves no lease
            self._queues.departures.pop(sequence.sequence_id, None)
            self._queues.lose_lease(sequence)
        if sequence.state is State.FINISHED:
            return ()
        if refusal.reason in _FINAL:
            return (self._fail(sequence, refusal),)
        self._queues.enqueue(sequence)
        if asked.ask is not Ask.ADOPT:
            sequence.kept_prompt_len = self._kept(sequence, refusal)
        # A refused replan freed its own pages, and the step's releases came after it.
        if asked.ask is Ask.ACQUIRE and refusal.reason is RefusalReason.NO_ROOM:
            self._admission.refused(sequence)
        return ()

    def _refuse_running(self, asked: Asked | None, refusal: Refusal) -> Iterable[Failed]:
        """Applies the refusal of an extend, or of an item about a running sequence; that fails where it is invalid."""
        sequence = asked.sequence if asked is not None else self._queues.unfinished.get(refusal.sequence_id)
        if sequence is None or sequence.state is State.FINISHED:
            return ()
        if asked is not None and asked.is_ahead and refusal.reason is not RefusalReason.INVALID:
            self._running_pages.refused_ahead()
            return ()
        if refusal.reason in _FINAL:
            return (self._fail(sequence, refusal),)
        sequence.num_refused_extends += 1
        return ()

    def _kept(self, sequence: Sequence, refusal: Refusal) -> int:
        """Returns how many tokens the cache service keeps of what it refused; after RESEND none: they are sent at
        once."""
        return self._admission.keeps(len(sequence.tokens)) if refusal.reason is RefusalReason.NO_ROOM else 0

    def _fail(self, sequence: Sequence, refusal: Refusal) -> Failed:
        """Forgets the request; it publishes nothing from now on. The field is named as in the request."""
        self._queues.finish(sequence, ReleaseReason.ABORTED, publishes=False)
        field = refusal.field.rpartition("].")[2]
        return Failed(sequence.sequence_id, refusal.detail, field or "prompt")


def _require_each_once(field: str, named: list[SequenceId], asked: Collection[SequenceId]) -> None:
    if len(set(named)) != len(named):
        raise UnaskedReply(f"{field}: a sequence is named twice")
    for sequence_id in named:
        if sequence_id not in asked:
            raise UnaskedReply(f"{field}: the reply names sequence {sequence_id}, for which nothing was asked")


def take_pages(sequence: Sequence, grant: Grant) -> None:
    """Takes the grant's pages; the next launch starts where the cached prefix ends.

    Counters stay once something was computed: what is cached after a preemption is the request's own work."""
    for table in sequence.tables:
        del table[:]
    place_pages(sequence.tables, grant.tables)
    usable = grant.usable_tokens
    sequence.start_len = sequence.computed_len = sequence.launched_len = sequence.published_len = usable
    sequence.in_prefill_until = len(sequence.tokens)
    sequence.kept_prompt_len = sequence.num_rejected = 0
    sequence.restore, sequence.snapshots = grant.restore, grant.snapshots
    sequence.working, sequence.rolling = grant.working, grant.rolling
    if sequence.match is NO_MATCH:
        sequence.match = grant.match
    if not sequence.computed_tokens:
        sequence.cached_tokens, sequence.fetched_tokens = grant.cached_tokens, grant.fetched_tokens
