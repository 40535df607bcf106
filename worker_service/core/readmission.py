"""What happens to live sequences after a reconnect: they go on, are adopted, or queue again.

Before that the stream was closed and the launches in flight have ended. When to connect again, and how often, is
session_keeper.py's.

    the same state of the service     repeat the unanswered Step; everything goes on
    another state                     what computed nothing queues again; the rest is adopted; tickets are void;
                                      then the inventory is offered

A worker that took pages by itself meanwhile (own_pages.py) has given up the state that it had: it asks for another one.
"""

from __future__ import annotations

from typing import NamedTuple

from session.messages import Step, Welcome
from session.protocol import INVENTORY
from session.words import ReleaseReason
from worker_service.core.admission import Admission
from worker_service.core.adoption import Adoptions
from worker_service.core.asked import Ask
from worker_service.core.errors import LostPlace
from worker_service.core.launches import Output
from worker_service.core.limits import Terms
from worker_service.core.queues import Queues
from worker_service.core.reply_handler import Failed
from worker_service.core.restoration import PageRecords
from worker_service.core.sequence import FinishReason, Sequence, State
from worker_service.core.step_builder import StepBuilder

# Steps with an acquire of one sequence that ended their sessions; it fails alone at the second one.
MAX_REJECTED = 2


class Readmission(NamedTuple):
    """`repeat` is the step to send again, if any; the clients of the `failed` requests and of the `ended` ones, which
    get no more tokens, are to be told."""

    repeat: Step | None
    failed: tuple[Failed, ...]
    ended: tuple[Output, ...]


class Readmitter:
    def __init__(
        self,
        terms: Terms,
        queues: Queues,
        steps: StepBuilder,
        admission: Admission,
        adoptions: Adoptions,
        pages: PageRecords,
    ) -> None:
        self._recorder, self._restoration = pages
        self._terms = terms
        self._queues = queues
        self._steps = steps
        self._admission = admission
        self._adoptions = adoptions
        self._epoch = ""
        self._generation = 0
        self.is_detached = False

    @property
    def generation(self) -> int:
        """Returns what the next Hello names: the state of the cache service to go on from; 0 asks for a new one."""
        return 0 if self.is_detached else self._generation

    def detach(self) -> None:
        """Gives up the cache service's state: no reply of it will be applied, and the next Hello asks for a new one."""
        self.is_detached = True
        self._adoptions.suspend()
        self._recorder.lost(self._queues.undoubted())

    def readmit(self, welcome: Welcome) -> Readmission:
        """Raises LostPlace when the worker has to send Hello again, with generation 0."""
        is_same = (welcome.epoch, welcome.generation) == (self._epoch, self._generation)
        if is_same and self.is_detached:
            raise LostPlace("the cache service goes on from a state that this worker has given up meanwhile")
        if is_same and not self._steps.is_at(welcome.last_step_id):
            self._generation = 0
            raise LostPlace(f"the cache service is at step {welcome.last_step_id}, which this worker did not send last")
        self._epoch, self._generation, self.is_detached = welcome.epoch, welcome.generation, False
        self._terms.take(welcome.limits, welcome.capabilities)
        failed, ended = self._fail_excessive(), self._end_full()
        if not is_same:
            self._begin_anew(welcome)
        if welcome.forget is not None:
            self._recorder.forget(welcome.forget)
        if is_same:
            return Readmission(self._steps.unanswered, failed, ended)
        if INVENTORY in welcome.capabilities:
            self._restoration.begin()
        return Readmission(None, failed, ended)

    def reject_step(self) -> tuple[Failed, ...]:
        """The unanswered step ended two sessions: it is void, and the next Hello begins anew.

        Requests that it asked pages for ask one by one, so that the rejected request is alone in its next step.
        Returns the one that was alone already."""
        self._generation = 0
        self._admission.one_by_one()
        suspects = [asked.sequence for asked in self._steps.asked.values() if asked.ask in (Ask.ACQUIRE, Ask.ADOPT)]
        for sequence in suspects:
            sequence.num_rejected += 1
        if len(suspects) > 1:
            return ()
        rejected = [sequence for sequence in suspects if sequence.num_rejected >= MAX_REJECTED]
        return tuple(self._fail(sequence, "prompt", "the cache service rejects it") for sequence in rejected)

    def _fail_excessive(self) -> tuple[Failed, ...]:
        """Fails the requests beyond the limits, which may have become smaller."""
        failed = []
        for sequence in list(self._queues.unfinished.values()):
            if (excess := self._terms.excess(sequence)) is not None:
                failed.append(self._fail(sequence, excess.field, excess.reason))
        return tuple(failed)

    def _end_full(self) -> tuple[Output, ...]:
        """Ends the sequences whose answers have come to the limits' end, as they would have under these from the start:
        what they got stays right."""
        ended = []
        for sequence in list(self._queues.unfinished.values()):
            if self._terms.is_full(sequence):
                self._queues.finish(sequence, ReleaseReason.FINISHED, publishes=False)
                ended.append(Output(sequence.sequence_id, (), FinishReason.LENGTH, sequence.usage()))
        return tuple(ended)

    def _fail(self, sequence: Sequence, field: str, reason: str) -> Failed:
        self._queues.finish(sequence, ReleaseReason.ABORTED, publishes=False)
        return Failed(sequence.sequence_id, reason, field)

    def _begin_anew(self, welcome: Welcome) -> None:
        waiting = [asked.sequence for asked in self._steps.asked.values() if asked.ask is Ask.ACQUIRE]
        self._recorder.lost(self._queues.undoubted())
        self._restoration.end()
        self._steps.reset(welcome.last_step_id)
        self._queues.departures.clear()
        self._queues.aborted_with_kept_prompt.clear()
        adopted: list[Sequence] = []
        for sequence in list(self._queues.leased):
            if self._is_adoptable(sequence) and len(adopted) < self._terms.config.max_num_seqs:
                adopted.append(sequence)
            else:
                self._queues.lose_lease(sequence)
                waiting.append(sequence)
        self._adoptions.begin(adopted)
        for sequence in waiting:
            if sequence.state is not State.FINISHED:
                self._queues.enqueue(sequence)
        for sequence in self._queues.unfinished.values():
            sequence.kept_prompt_len = 0

    def _is_adoptable(self, sequence: Sequence) -> bool:
        """Returns False after an adopt of it ended two sessions: then it is computed again."""
        is_running = sequence.state in (State.RUNNING, State.ADOPTING)
        return is_running and sequence.has_computed and not sequence.num_rejected
