"""Decides what the engine asks of the cache service and what the next launch computes.

Knows no clock, no wire, no thread, no tensor and no text. The engine drives it in this order, one launch at a time:

    while launch k - 1 runs:  step = next_step();  reply = await cache.step(step);  apply(reply)
    when it has ended:        complete(launch, accepted, failed_rows);  launch k = next_launch()

A step may go out without a launch (an idle flush): next_step() is None when there is nothing to say. After a lost
session: complete the launch, drain the mover, connect(generation), then follow readmit(welcome).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from session.messages import Ack, Rates, Step, StepReply, Welcome
from session.words import TOKEN_BYTES, ReleaseReason, SequenceId, SnapshotSlot
from worker_service.core.admission import Admission
from worker_service.core.adoption import Adoptions
from worker_service.core.batch import Batch, build_batch
from worker_service.core.errors import InvalidField, QueueFull
from worker_service.core.launch_plan import Progress, Row, SchedulerConfig, plan_launch
from worker_service.core.limits import Terms
from worker_service.core.queues import Queues
from worker_service.core.readmission import Readmission, Readmitter
from worker_service.core.reply_handler import Applied, Failed, ReplyHandler
from worker_service.core.sequence import FinishReason, QueueOrder, Request, Sequence, State, Usage
from worker_service.core.step_builder import StepBuilder


class LaunchRow(NamedTuple):
    """A batch row's sequence. STATE groups: restore snapshots before the launch, leave them as it passes boundaries."""

    sequence_id: SequenceId
    lease: int
    first_token: int
    num_tokens: int
    samples: bool
    restore: tuple[SnapshotSlot, ...]
    leave: tuple[SnapshotSlot, ...]
    working: tuple[SnapshotSlot, ...]
    rolling: tuple[SnapshotSlot, ...]


class Launch(NamedTuple):
    number: int
    rows: tuple[LaunchRow, ...]
    batch: Batch

    @property
    def num_sampled(self) -> int:
        return len(self.batch.sampled)


class Output(NamedTuple):
    """New tokens of a sequence; `finish` and `usage` come with the last ones."""

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    usage: Usage | None = None


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        config.validate()
        self.config = config
        self._terms = Terms(config)
        self._queues = Queues()
        self._admission = Admission(self._terms, self._queues)
        self._adoptions = Adoptions(self._terms, self._queues)
        self._steps = StepBuilder(self._terms, self._queues, self._admission, self._adoptions)
        self._replies = ReplyHandler(self._queues, self._steps, self._admission)
        self._readmitter = Readmitter(self._terms, self._queues, self._steps, self._admission, self._adoptions)
        self._num_requests = 0
        self._num_launches = 0
        self._in_flight: _Flight | None = None

    # -- requests --

    def add(self, request: Request) -> None:
        """Queues a request. Raises QueueFull when too many wait, InvalidField when it could never be served."""
        if len(request.prompt) % TOKEN_BYTES:
            raise InvalidField("prompt", f"{len(request.prompt)} bytes are not packed int32")
        sequence = Sequence(request, QueueOrder(-request.priority, self._num_requests + 1), len(self.config.groups))
        self._check(sequence)
        self.require_room()
        self._num_requests += 1
        self._queues.enqueue(sequence)

    def require_room(self) -> None:
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
    def num_held(self) -> int:
        """Requests that the last step held back for a sibling."""
        return self._admission.num_held

    @property
    def num_adopting(self) -> int:
        """Sequences whose adopts are still to be sent; none of them runs before its reply."""
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
        """Returns what to ask of the cache service now, given the launch in flight; None when that is nothing."""
        return self._steps.next_step()

    def retry_refused(self) -> None:
        """Lets the refused request ask again although nothing was seen to be freed; for an idle engine."""
        self._admission.freed()

    def apply(self, reply: StepReply) -> Applied:
        """Applies the reply to the unanswered step, before the next launch is made."""
        return self._replies.apply(reply)

    # -- launches --

    def next_launch(self) -> Launch | None:
        """Returns the next launch, of sequences whose pages are granted; None when there is nothing to run."""
        assert self._in_flight is None, "one launch in flight at most"
        standing = [
            Progress(sequence, sequence.computed_len, len(sequence.tokens), self._steps.room(sequence))
            for sequence in self._queues.leased
            if sequence.state is State.RUNNING
        ]
        config = self._terms.config
        plan = plan_launch(standing, config, within_room=True)
        if not plan.rows:
            return None
        batch = build_batch(plan.rows, plan.num_decode, config.groups, config.page_tokens)
        self._num_launches += 1
        launch = Launch(self._num_launches, tuple(_launch_row(row) for row in plan.rows), batch)
        for row in plan.rows:
            row.sequence.launched_len = row.end
            row.sequence.written_len = max(row.sequence.written_len, row.end + config.decode_lookahead)
        self._in_flight = _Flight(launch, tuple(row.sequence for row in plan.rows))
        return launch

    def complete(self, launch: Launch, accepted: Seq[Seq[int]], failed_rows: Container[int] = ()) -> tuple[Output, ...]:
        """Takes the accepted tokens of an ended launch, one run for each row that samples, in the order of `sampled`.

        What arrives for a sequence that was aborted meanwhile is dropped. The requests of `failed_rows` (indices of
        launch.rows) are forgotten, and nothing of them is published any more.
        """
        flight = self._end_flight(launch)
        if len(accepted) != launch.num_sampled:
            raise ValueError(f"{len(accepted)} runs of tokens for {launch.num_sampled} rows that sample")
        runs = iter(accepted)
        outputs: list[Output] = []
        for index, (row, sequence) in enumerate(zip(launch.rows, flight.sequences, strict=True)):
            tokens = next(runs) if row.samples else ()
            if index in failed_rows:
                self._queues.finish(sequence, ReleaseReason.ABORTED, publishes=False)
            elif sequence.leased and sequence.lease == row.lease and sequence.state is not State.FINISHED:
                outputs += self._advance(sequence, row, tokens)
        return tuple(outputs)

    def _end_flight(self, launch: Launch) -> _Flight:
        flight, self._in_flight = self._in_flight, None
        assert flight is not None and flight.launch is launch, "not the launch in flight"
        for sequence in flight.sequences:
            sequence.launched_len = sequence.computed_len
        return flight

    def _advance(self, sequence: Sequence, row: LaunchRow, tokens: Seq[int]) -> Iterable[Output]:
        end = row.first_token + row.num_tokens
        in_prefill = row.first_token < sequence.in_prefill_until
        most = 1 if in_prefill else 1 + self.config.decode_lookahead
        if row.samples and not 1 <= len(tokens) <= most:
            raise ValueError(f"sequence {row.sequence_id} accepts 1 to {most} tokens, not {len(tokens)}")
        if in_prefill:
            sequence.computed_tokens += row.num_tokens
        kept, reason = self._append(sequence, tokens)
        # The last token has no KV yet; those accepted before it have.
        sequence.computed_len = sequence.launched_len = end + max(len(kept) - 1, 0)
        if sequence.leave:
            sequence.leave = tuple(slot for slot in sequence.leave if slot.boundary_tokens > end)
        if reason is not None:
            self._queues.finish(sequence, ReleaseReason.FINISHED)
            return (Output(row.sequence_id, kept, reason, sequence.usage()),)
        return (Output(row.sequence_id, kept),) if kept else ()

    def _append(self, sequence: Sequence, tokens: Seq[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends up to the first token that ends the sequence, that one included."""
        sampling = sequence.sampling
        for count, token in enumerate(tokens, start=1):
            sequence.tokens.append(token)
            if token in sampling.stop_token_ids or (token in self.config.eos_token_ids and not sampling.ignore_eos):
                return tuple(tokens[:count]), FinishReason.STOP
            is_longest = len(sequence.tokens) >= self._terms.config.max_model_len
            if is_longest or sequence.num_generated >= sampling.max_tokens:
                return tuple(tokens[:count]), FinishReason.LENGTH
        return tuple(tokens), None

    # -- the session --

    @property
    def generation(self) -> int:
        """For Hello: the state of the cache service to go on from; 0 asks for a new one."""
        return self._readmitter.generation

    def readmit(self, welcome: Welcome) -> Readmission:
        """Follows a Welcome. Returns the step to repeat, if any; sequences that the cache service does not know any
        more are
        adopted with the coming steps, or queue again. Raises LostPlace when Hello is to be sent again."""
        assert self._in_flight is None, "a launch ends before Hello"
        return self._readmitter.readmit(welcome)

    def reject_step(self) -> tuple[Failed, ...]:
        """Drops the unanswered step, which ended two sessions; the next Hello asks for a new state.

        Returns failed requests.
        """
        return self._readmitter.reject_step()


class _Flight(NamedTuple):
    launch: Launch
    sequences: tuple[Sequence, ...]


def _left_by(row: Row) -> tuple[SnapshotSlot, ...]:
    return tuple(slot for slot in row.sequence.leave if row.first_token < slot.boundary_tokens <= row.end)


def _launch_row(row: Row) -> LaunchRow:
    sequence = row.sequence
    return LaunchRow(
        sequence.sequence_id,
        sequence.lease,
        row.first_token,
        row.num_tokens,
        samples=row.end == len(sequence.tokens),
        restore=sequence.restore if row.first_token == sequence.start_len else (),
        leave=_left_by(row) if sequence.leave else (),
        working=sequence.working,
        rolling=sequence.rolling,
    )
