"""The launches in flight: makes the next one of rows that have pages, and takes the tokens of the oldest one.

Each is made from what the ones before it will have computed (prediction.py), so its results may come for a sequence
that has ended, or has another lease, by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from session.words import ReleaseReason, SequenceId
from worker_service.core.batch import Batch, build_batch
from worker_service.core.launch_plan import Row, plan_launch
from worker_service.core.limits import Terms
from worker_service.core.penalty_slots import PenaltySlots
from worker_service.core.prediction import Prediction
from worker_service.core.queues import Queues
from worker_service.core.sequence import FinishReason, Sequence, State, Usage


class LaunchRow(NamedTuple):
    """A batch row's sequence, and which of its tokens the launch computes."""

    sequence_id: SequenceId
    lease_number: int
    first_token: int
    num_tokens: int
    samples: bool


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


class _Flight(NamedTuple):
    launch: Launch
    sequences: tuple[Sequence, ...]


class Launches:
    def __init__(self, terms: Terms, queues: Queues, prediction: Prediction) -> None:
        self._terms = terms
        self._queues = queues
        self._prediction = prediction
        self._slots = PenaltySlots(terms.config.max_num_seqs)
        self._max_accepted = 1 + terms.config.num_speculative_tokens  # tokens of a decode row
        self._num_launches = 0
        self._flights: deque[_Flight] = deque()  # oldest first

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def max_flights(self) -> int:
        """Returns how many launches may be in flight; 1 with draft tokens: how many are accepted is not predicted."""
        config = self._terms.config
        return 2 if config.async_scheduling and not config.num_speculative_tokens else 1

    def next(self) -> Launch | None:
        """Returns the next launch, of sequences whose pages are granted; None when there is nothing to run.

        What the launch in flight computes counts as computed; tokens that it samples are named by their place in it
        (Batch.from_previous).
        """
        assert len(self._flights) < self.max_flights, "too many launches in flight"
        config, num_waiting = self._terms.config, len(self._queues.waiting)
        plan = plan_launch(self._prediction.progress(), config, within_pages=True, num_waiting=num_waiting)
        if not plan.rows:
            return None
        for row in plan.rows:
            self._slots.assign(row.sequence)
        batch = build_batch(plan.rows, plan.num_decode, config.groups, config.page_tokens)
        self._num_launches += 1
        launch = Launch(self._num_launches, tuple(_launch_row(row) for row in plan.rows), batch)
        for row in plan.rows:
            row.sequence.launched_len = row.end
            row.sequence.written_len = max(row.sequence.written_len, row.end + config.num_speculative_tokens)
        for index, entry in enumerate(batch.sampled):
            sequence = plan.rows[entry.row].sequence
            sequence.num_pending += 1
            sequence.sample_index = index
            sequence.counted_len = entry.position
        self._flights.append(_Flight(launch, tuple(row.sequence for row in plan.rows)))
        return launch

    def complete(self, launch: Launch, accepted: Seq[Seq[int]], failed_rows: Container[int] = ()) -> tuple[Output, ...]:
        """Takes the accepted tokens of the oldest launch, one run for each row that samples, in the order of `sampled`.

        What arrives for a sequence that ended meanwhile is dropped: it was aborted, or the launch before brought its
        last token. The requests of `failed_rows` (indices of launch.rows) are forgotten, and nothing of them is
        published any more.
        """
        flight = self._end_flight(launch)
        if len(accepted) != launch.num_sampled:
            raise ValueError(f"{len(accepted)} runs of tokens for {launch.num_sampled} rows that sample")
        runs = iter(accepted)
        outputs: list[Output] = []
        for index, (row, sequence) in enumerate(zip(launch.rows, flight.sequences, strict=True)):
            tokens = next(runs) if row.samples else ()
            has_that_lease = sequence.has_lease and sequence.lease_number == row.lease_number
            if index in failed_rows:
                self._queues.finish(sequence, ReleaseReason.ABORTED, publishes=False)
            elif has_that_lease and sequence.state is not State.FINISHED:
                outputs += self._advance(sequence, row, tokens)
        return tuple(outputs)

    def _end_flight(self, launch: Launch) -> _Flight:
        assert self._flights and self._flights[0].launch is launch, "not the oldest launch in flight"
        return self._flights.popleft()

    def _advance(self, sequence: Sequence, row: LaunchRow, tokens: Seq[int]) -> Iterable[Output]:
        end = row.first_token + row.num_tokens
        in_prefill = row.first_token < sequence.in_prefill_until
        most = 1 if in_prefill else self._max_accepted
        if row.samples and not 1 <= len(tokens) <= most:
            raise ValueError(f"sequence {row.sequence_id} accepts 1 to {most} tokens, not {len(tokens)}")
        sequence.num_pending -= row.samples
        if in_prefill:
            sequence.computed_tokens += row.num_tokens
        kept, reason = self._append(sequence, tokens)
        # The last token has no KV yet; those accepted before it have.
        sequence.computed_len = end + max(len(kept) - 1, 0)
        # A younger launch may have gone on from there.
        sequence.launched_len = max(sequence.launched_len, sequence.computed_len)
        if sequence.snapshots:
            sequence.written_snapshots += tuple(slot for slot in sequence.snapshots if slot.boundary_tokens <= end)
            sequence.snapshots = tuple(slot for slot in sequence.snapshots if slot.boundary_tokens > end)
        if reason is not None:
            self._queues.finish(sequence, ReleaseReason.FINISHED)
            return (Output(row.sequence_id, kept, reason, sequence.usage()),)
        return (Output(row.sequence_id, kept),) if kept else ()

    def _append(self, sequence: Sequence, tokens: Seq[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends up to the first token that ends the sequence, that one included."""
        sampling, config = sequence.sampling, self._terms.config
        for count, token in enumerate(tokens, start=1):
            sequence.tokens.append(token)
            if token in sampling.stop_token_ids or (token in config.eos_token_ids and not sampling.ignore_eos):
                return tuple(tokens[:count]), FinishReason.STOP
            length = len(sequence.tokens)
            if length >= sequence.end_len or length >= config.max_model_len:
                return tuple(tokens[:count]), FinishReason.LENGTH
        return tuple(tokens), None


def _launch_row(row: Row) -> LaunchRow:
    sequence, first_token, num_tokens = row
    return LaunchRow(
        sequence.request.sequence_id,
        sequence.lease_number,
        first_token,
        num_tokens,
        samples=first_token + num_tokens == len(sequence.tokens) + sequence.num_pending,
    )
