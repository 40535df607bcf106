"""The facade of the worker's core, which the engine drives. Each decision has a file of its own in this folder.

Knows no clock, no wire, no thread, no tensor and no text. The engine drives it in this order:

    while launch k runs:   launch k + 1 = next_launch(), from predictions of what k computes
    when k has ended:      complete(launch k, accepted, failed_rows)
    while k + 1 runs:      step = next_step();  reply = await cache.step(step);  apply(reply);  launch k + 2 = ...

A launch does not wait for a reply: it runs the rows that have pages. next_step() is None when there is nothing to say.
After a lost session: drain the mover, connect(generation), complete the launches in flight, then follow
readmit(welcome).
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq

from session.messages import Ack, Forget, Rates, Step, StepReply, Welcome
from session.words import TOKEN_BYTES, ReleaseReason, SequenceId
from worker_service.core.admission import Admission
from worker_service.core.adoption import Adoptions
from worker_service.core.errors import InvalidField, QueueFull
from worker_service.core.inventory import Inventory
from worker_service.core.inventory_recorder import Recorder
from worker_service.core.launches import Launch, Launches, Output
from worker_service.core.limits import Terms
from worker_service.core.own_pages import OwnPages
from worker_service.core.prediction import Prediction
from worker_service.core.queues import Queues
from worker_service.core.readmission import Readmission, Readmitter
from worker_service.core.reply_handler import Applied, Failed, ReplyHandler
from worker_service.core.restoration import PageRecords, Restoration
from worker_service.core.running_pages import RunningPages
from worker_service.core.scheduler_config import SchedulerConfig
from worker_service.core.sequence import QueueOrder, Request, Sequence, State, Usage
from worker_service.core.step_builder import StepBuilder


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        config.validate()
        self.config = config
        self._terms = Terms(config)
        self._queues = Queues()
        self._admission = Admission(self._terms, self._queues)
        self._adoptions = Adoptions(self._terms, self._queues)
        self.inventory = Inventory(config.groups, config.page_tokens)
        self._recorder = Recorder(self.inventory)
        self._restoration = Restoration(self.inventory, config.groups)
        pages = PageRecords(self._recorder, self._restoration)
        prediction = Prediction(self._terms, self._queues)
        running_pages = RunningPages(self._terms, self._queues, prediction, self._restoration)
        self._steps = StepBuilder(self._terms, self._queues, self._admission, self._adoptions, running_pages, pages)
        self._replies = ReplyHandler(self._queues, self._steps, self._admission, running_pages, self._recorder)
        self._readmitter = Readmitter(self._terms, self._queues, self._steps, self._admission, self._adoptions, pages)
        self._own_pages = OwnPages(self._terms, self._queues, prediction, self._recorder, self.inventory)
        self._launches = Launches(self._terms, self._queues, prediction)
        self._num_requests = 0

    # -- requests --

    def add(self, request: Request) -> None:
        """Queues a request. Raises QueueFull when too many wait, InvalidField when it could never be served."""
        if len(request.prompt) % TOKEN_BYTES:
            raise InvalidField("prompt", f"{len(request.prompt)} bytes are not packed int32")
        sequence = Sequence(request, QueueOrder(-request.priority, self._num_requests + 1), len(self.config.groups))
        self._check(sequence)
        self.require_capacity()
        self._num_requests += 1
        self._queues.enqueue(sequence)

    def require_capacity(self) -> None:
        """Raises QueueFull when as many requests wait as may."""
        if len(self._queues.waiting) >= self.config.max_waiting:
            raise QueueFull(f"{self.config.max_waiting} requests wait already")

    def _check(self, sequence: Sequence) -> None:
        request = sequence.request
        if self._is_in_use(request.sequence_id):
            raise InvalidField("sequence_id", f"{request.sequence_id} is in use")
        if sequence.prompt_len == 0:
            raise InvalidField("prompt", "is empty")
        self._terms.check(sequence)
        if min(sequence.tokens) < 0 or max(sequence.tokens) >= self.config.vocab_size:
            raise InvalidField("prompt", f"has a token outside of 0 .. {self.config.vocab_size - 1}")
        request.sampling.validate()

    def _is_in_use(self, sequence_id: SequenceId) -> bool:
        """Returns whether the cache service may still hold a lease under this id."""
        if sequence_id in self._queues.unfinished or sequence_id in self._steps.asked:
            return True
        unanswered = self._steps.unanswered
        ids = [sequence.sequence_id for sequence in self._queues.leased]
        ids += [release.sequence_id for release in unanswered.releases] if unanswered is not None else []
        return sequence_id in ids

    def abort(self, sequence_id: SequenceId) -> bool:
        """Drops a request; its lease ends with the next step.

        Returns False when it is unknown, for example finished.
        """
        sequence = self._queues.unfinished.get(sequence_id)
        if sequence is not None:
            self._queues.finish(sequence, ReleaseReason.ABORTED)
        return sequence is not None

    def finish(self, sequence_id: SequenceId) -> Usage | None:
        """Ends a request as finished, because its text has a stop string. Returns None when it is unknown."""
        sequence = self._queues.unfinished.get(sequence_id)
        if sequence is None:
            return None
        self._queues.finish(sequence, ReleaseReason.FINISHED)
        return sequence.usage()

    def usage(self, sequence_id: SequenceId) -> Usage | None:
        """Returns what an unfinished request has used so far; None when it is unknown."""
        sequence = self._queues.unfinished.get(sequence_id)
        return sequence.usage() if sequence is not None else None

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        return len(self._queues.leased)

    @property
    def has_running(self) -> bool:
        """Returns whether any sequence is to compute more; one that has ended holds its lease until the next step."""
        return any(sequence.state is State.RUNNING for sequence in self._queues.leased)

    @property
    def num_held(self) -> int:
        """Returns how many requests the last step held back for a sibling."""
        return self._admission.num_held

    @property
    def num_adopting(self) -> int:
        """Returns how many sequences' adopts are still to be sent; none of them runs before its reply."""
        return self._adoptions.num_pending

    @property
    def num_unfinished(self) -> int:
        return len(self._queues.unfinished)

    # -- steps --

    def report(self, ack: Ack) -> None:
        """Takes the ack of a fetch or a spill; the next step carries it."""
        self._steps.report(ack)

    def report_rates(self, rates: Rates) -> None:
        """Takes measured rates; they go with the next step that has other content."""
        self._steps.rates = rates

    @property
    def unanswered(self) -> Step | None:
        return self._steps.unanswered

    def next_step(self) -> Step | None:
        """Returns what to ask of the cache service now, given the launches in flight; None when that is nothing."""
        return self._steps.next_step()

    def retry_refused(self) -> None:
        """Lets the refused request ask again although nothing was seen to be freed; for an idle engine."""
        self._admission.freed()

    def apply(self, reply: StepReply) -> Applied:
        """Applies the reply to the unanswered step, before the next launch is made."""
        return self._replies.apply(reply)

    # -- launches --

    @property
    def max_flights(self) -> int:
        """Returns how many launches may be in flight."""
        return self._launches.max_flights

    def next_launch(self) -> Launch | None:
        """Returns the next launch, of sequences whose pages are granted; None when there is nothing to run."""
        return self._launches.next()

    def complete(self, launch: Launch, accepted: Seq[Seq[int]], failed_rows: Container[int] = ()) -> tuple[Output, ...]:
        """Takes the accepted tokens of the oldest launch, one run for each row that samples; the requests of failed
        rows are forgotten."""
        return self._launches.complete(launch, accepted, failed_rows)

    # -- the session --

    @property
    def generation(self) -> int:
        """Returns what Hello is to name: the state of the cache service to go on from; 0 asks for a new one."""
        return self._readmitter.generation

    @property
    def is_detached(self) -> bool:
        """Returns whether this worker has given up the state of the cache service and not got a new one yet."""
        return self._readmitter.is_detached

    def has_stalled_rows(self) -> bool:
        """Returns whether some row that decodes stands still without the cache service."""
        return self.num_adopting > 0 or self._own_pages.decode_lacks_pages()

    def detach(self) -> None:
        """Gives up the state of the cache service: rows may take pages by themselves once transfers have ended."""
        self._readmitter.detach()
        self._own_pages.begin()

    def take_pages(self) -> int:
        """Gives pages of the worker's own choice to rows that lack them. Returns how many; only while detached."""
        assert self.is_detached, "pages are the cache service's to grant"
        return self._own_pages.take()

    def readmit(self, welcome: Welcome) -> Readmission:
        """Follows a Welcome. Returns the step to repeat, if any; sequences that the cache service does not know any
        more are adopted with the coming steps, or queue again. Raises LostPlace when Hello is to be sent again."""
        assert not self._launches.num_in_flight, "launches end before a Welcome is followed"
        return self._readmitter.readmit(welcome)

    @property
    def is_restoring(self) -> bool:
        """Returns whether some of the inventory is still to be offered to the cache service."""
        return self._restoration.is_pending

    def withhold_inventory(self) -> None:
        """Offers nothing to this state of the cache service: the worker takes no new requests."""
        self._restoration.end()

    def forget(self, forget: Forget) -> None:
        """Follows Clear calls: the inventory forgets what they dropped, and the next step confirms it."""
        self._recorder.forget(forget)

    def reject_step(self) -> tuple[Failed, ...]:
        """Drops the unanswered step, which ended two sessions; the next Hello asks for a new state.

        Returns failed requests.
        """
        return self._readmitter.reject_step()
