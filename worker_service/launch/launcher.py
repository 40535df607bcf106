"""Runs launches one at a time in the model's own thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from session.words import SequenceId
from worker_service.core.batch import Batch
from worker_service.core.errors import DeviceLost
from worker_service.core.scheduler import Launch, Output
from worker_service.core.sequence import TokenLogprobs
from worker_service.launch.row_faults import LaunchTokens, RowResults, run_rows

# The most that the event loop waits for the model's thread to take a launch over.
BEGIN_S = 0.002


class BatchRunner(Protocol):
    """`run` returns when the launch is complete; it is called from one thread."""

    def run(self, batch: Batch) -> LaunchTokens: ...


class EndedLaunch(NamedTuple):
    """A launch that has ended: its rows' results, or the loss of the device."""

    launch: Launch
    results: RowResults | None
    lost: DeviceLost | None
    start_s: float
    end_s: float


class NewTokens(NamedTuple):
    """Tokens of an ended launch that the scheduler has taken in and that are still to be delivered to their callers."""

    ended: EndedLaunch
    outputs: tuple[Output, ...]

    def logprobs(self) -> dict[SequenceId, TokenLogprobs | None]:
        results = self.ended.results
        sampling = (row.sequence_id for row in self.ended.launch.rows if row.samples)
        return dict(zip(sampling, results.logprobs, strict=True)) if results is not None else {}


class _Flight:
    """A launch in flight. `run_start_s` is when the part that runs now began."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.has_begun = threading.Event()
        self.ended: Future[EndedLaunch] = Future()
        self.start_s = self.run_start_s = time.monotonic()

    def end(self, results: RowResults | None, lost: DeviceLost | None) -> None:
        try:
            self.ended.set_result(EndedLaunch(self.launch, results, lost, self.start_s, time.monotonic()))
        except InvalidStateError:  # it timed out before, and has returned now
            return


class Launcher:
    """At most one launch in flight. One that does not return within `timeout_s` (0: no limit) is a DeviceLost."""

    def __init__(self, runner: BatchRunner, timeout_s: float = 0.0) -> None:
        self._runner = runner
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._flight: _Flight | None = None
        self._is_stuck = False

    def start(self, launch: Launch) -> None:
        assert self._flight is None, "one launch in flight at most"
        flight = self._flight = _Flight(launch)
        self._thread.submit(self._run, flight)
        # Block for up to BEGIN_S, or the loop, busy with streams, keeps the interpreter lock while the device idles.
        flight.has_begun.wait(BEGIN_S)

    async def interrupted_by(self, event: asyncio.Event) -> bool:
        """Waits for the launch in flight or the event. Returns True when the event was first."""
        flight = self._flight
        if flight is None or flight.ended.done():
            return False
        event_set = asyncio.create_task(event.wait())
        try:
            await self._wait_for(flight, event_set)
            return not flight.ended.done()
        finally:
            event_set.cancel()

    async def wait(self) -> EndedLaunch | None:
        """Waits for the launch in flight and returns how it ended; None when there is none. Never raises."""
        flight = self._flight
        if flight is None:
            return None
        await self._wait_for(flight)
        self._flight = None
        return flight.ended.result()

    async def _wait_for(self, flight: _Flight, *others: asyncio.Task[Any]) -> None:
        """Waits until the flight or one of the others has ended; a flight beyond the timeout is ended here."""
        waited_for: set[asyncio.Future[Any]] = {asyncio.wrap_future(flight.ended), *others}
        while True:
            left_s = flight.run_start_s + self._timeout_s - time.monotonic() if self._timeout_s else None
            if left_s is not None and left_s <= 0:
                self._is_stuck = True
                reason = f"launch {flight.launch.number} did not return within {self._timeout_s:g} s"
                flight.end(None, DeviceLost(reason))
                return
            done, _ = await asyncio.wait(waited_for, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return

    def barrier(self) -> Callable[[], None]:
        """Returns a function that waits, in another thread, for the launch that is in flight now, however it ends."""
        flight = self._flight

        def wait() -> None:
            if flight is not None:
                flight.ended.exception()

        return wait

    def close(self) -> None:
        """Ends the thread; not waited for when a launch is stuck in it."""
        self._thread.shutdown(wait=not self._is_stuck)

    def _run(self, flight: _Flight) -> None:
        flight.start_s = flight.run_start_s = time.monotonic()
        flight.has_begun.set()

        def run(batch: Batch) -> LaunchTokens:
            flight.run_start_s = time.monotonic()
            return self._runner.run(batch)

        # A row that owns a working slot changes it in place, so it cannot be run twice.
        may_repeat = not any(row.working for row in flight.launch.rows)
        try:
            flight.end(run_rows(run, flight.launch.batch, may_repeat=may_repeat), None)
        except DeviceLost as lost:
            flight.end(None, lost)
