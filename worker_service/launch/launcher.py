"""Keeps launches in flight: one thread submits them in order, another waits for their results.

event loop     plan k+1 ........ complete k, plan k+2 ........
model thread   submit k+1 ...... submit k+2 ..................
device         [----- k -----][----- k+1 -----][----- k+2 -----]
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import NamedTuple

from session.words import SequenceId
from worker_service.core.batch import Batch
from worker_service.core.batch_part import with_known_tokens
from worker_service.core.errors import DeviceLost
from worker_service.core.launches import Launch, Output
from worker_service.core.runner_port import BatchRunner, DeviceTimes, LaunchTokens, Submitted
from worker_service.core.sampling_params import TokenLogprobs
from worker_service.launch.row_faults import RowResults, run_in_parts

# The most that the event loop waits for the model's thread to submit a launch.
SUBMIT_S = 0.002


class EndedLaunch(NamedTuple):
    """A launch that has ended: its rows' results, or the loss of the device.

    It began at `start_s`, or when the launch before it ended. `times` are the device's own; None where it has no clock,
    and for a launch that failed as a whole.
    """

    launch: Launch
    outcome: RowResults | DeviceLost
    start_s: float
    end_s: float
    times: DeviceTimes | None = None


class NewTokens(NamedTuple):
    """Tokens of an ended launch that the scheduler has taken in and that are still to be delivered to their callers."""

    launch: Launch
    results: RowResults
    end_s: float
    outputs: tuple[Output, ...]

    def logprobs(self) -> dict[SequenceId, TokenLogprobs | None]:
        sampling = (row.sequence_id for row in self.launch.rows if row.samples)
        return dict(zip(sampling, self.results.logprobs, strict=True))


class _Flight:
    """A launch in flight. `run_start_s` is when the part that runs now was submitted."""

    def __init__(self, launch: Launch, previous: _Flight | None, on_end: Callable[[], None]) -> None:
        self.launch = launch
        self.previous = previous
        self.submitted = threading.Event()
        self.ended: Future[EndedLaunch] = Future()
        self.run_start_s = time.monotonic()
        self.ended.add_done_callback(lambda _: on_end())

    def end(self, outcome: RowResults | DeviceLost, times: DeviceTimes | None = None) -> None:
        end_s = time.monotonic()
        try:
            self.ended.set_result(EndedLaunch(self.launch, outcome, self.start_s(), end_s, times))
        except InvalidStateError:  # it timed out before, and has returned now
            return

    def start_s(self) -> float:
        """Returns when it began to run, as far as the host knows."""
        previous = self.previous
        ended = previous is not None and previous.ended.done()
        return max(self.run_start_s, previous.ended.result().end_s) if ended and previous else self.run_start_s

    def known_batch(self) -> Batch:
        """Returns the batch with all its tokens, once the results of the launch before it have been read.

        That is waited for where no token comes from there, too: results lie in one of two buffers (model/staging.py)
        until they are read, and two parts of this launch take both. Raises DeviceLost.
        """
        batch, previous = self.launch.batch, self.previous
        if previous is None:
            return batch
        before = previous.ended.result().outcome
        if isinstance(before, DeviceLost):
            raise before
        return with_known_tokens(batch, before.token_ids) if batch.from_previous else batch


class Launcher:
    """Launches end in the order of their start. One that does not end within `timeout_s` (0: no limit) is a DeviceLost.

    All methods but `barrier`'s function are the event loop's.
    """

    def __init__(self, runner: BatchRunner, timeout_s: float = 0.0) -> None:
        self._runner = runner
        self._timeout_s = timeout_s
        self._model = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._results = ThreadPoolExecutor(1, thread_name_prefix="results")
        self._flights: deque[_Flight] = deque()
        self._is_stuck = False

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def start(self, launch: Launch, on_end: Callable[[], None]) -> None:
        """Submits the launch; `on_end` is called from another thread when it has ended."""
        flight = _Flight(launch, self._flights[-1] if self._flights else None, on_end)
        self._flights.append(flight)
        self._model.submit(self._submit, flight)
        # Block for up to SUBMIT_S, or the loop, busy with streams, keeps the interpreter lock while the device idles:
        # 64 streams of an 8B model gain 47 %.
        flight.submitted.wait(SUBMIT_S)

    def take_ended(self) -> EndedLaunch | None:
        """Returns how the oldest launch ended, and forgets it; None while it runs, or when there is none."""
        if not self._flights:
            return None
        flight = self._flights[0]
        if not flight.ended.done():
            if (left_s := self.time_left_s()) is None or left_s > 0:
                return None
            self._is_stuck = True
            flight.end(DeviceLost(f"launch {flight.launch.number} did not return within {self._timeout_s:g} s"))
        self._flights.popleft()
        # Or every flight would hold all flights before it.
        flight.previous = None
        return flight.ended.result()

    def time_left_s(self) -> float | None:
        """Returns how long the oldest launch may still run; None when that is not limited."""
        if not self._flights or not self._timeout_s:
            return None
        return self._flights[0].start_s() + self._timeout_s - time.monotonic()

    def barrier(self) -> Callable[[], None]:
        """Returns a function that waits, in another thread, for the launches in flight now, however they end."""
        flights = tuple(self._flights)

        def wait() -> None:
            for flight in flights:
                flight.ended.exception()

        return wait

    def close(self) -> None:
        """Ends the threads; not waited for when a launch is stuck in them."""
        self._model.shutdown(wait=not self._is_stuck)
        self._results.shutdown(wait=not self._is_stuck)

    # -- the model's thread --

    def _submit(self, flight: _Flight) -> None:
        flight.run_start_s = time.monotonic()
        try:
            submitted = self._runner.submit(flight.launch.batch)
        except DeviceLost as lost:
            flight.end(lost)
        except Exception as error:  # a row may be the cause
            self._run_in_parts(flight, error)
        else:
            self._results.submit(_wait, flight, submitted)
        finally:
            flight.submitted.set()

    def _run_in_parts(self, flight: _Flight, error: Exception) -> None:
        """Runs a launch again that failed as a whole, and gives the launch after it the tokens that it refers to."""

        def run(part: Batch) -> LaunchTokens:
            flight.run_start_s = time.monotonic()
            return self._runner.submit(part).wait().tokens

        # A row that owns a working slot changes it in place, so it cannot be run twice.
        may_repeat = not flight.launch.batch.states
        try:
            results = run_in_parts(run, flight.known_batch(), error, may_repeat=may_repeat)
            self._runner.set_previous(results.token_ids)
        except DeviceLost as lost:
            flight.end(lost)
        except Exception as unexpected:
            flight.end(_all_failed(flight, unexpected))
        else:
            flight.end(results)


# -- the results' thread --


def _wait(flight: _Flight, submitted: Submitted) -> None:
    try:
        tokens, times = submitted.wait()
    except DeviceLost as lost:
        flight.end(lost)
    except Exception as error:
        # The launch after it went on from what this one left on the device; its rows of these sequences are dropped.
        flight.end(_all_failed(flight, error))
    else:
        flight.end(RowResults(tokens.token_ids, tokens.logprobs, {}, None), times)


def _all_failed(flight: _Flight, error: Exception) -> RowResults:
    num_sampled, num_rows = flight.launch.num_sampled, flight.launch.batch.num_seqs
    return RowResults((0,) * num_sampled, (None,) * num_sampled, dict.fromkeys(range(num_rows), error), error)
