"""Runs launches one at a time in the model's own thread.

Knows no scheduler and no session; what a launch computed is handed back as it is.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from worker_service.core.batch import Batch
from worker_service.core.scheduler import Launch
from worker_service.core.sequence import TokenLogprobs

# The most that the event loop waits for the model's thread to take a launch over.
BEGIN_S = 0.002


class LaunchTokens(Protocol):
    """One entry for each sampled row of the batch."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def logprobs(self) -> tuple[TokenLogprobs | None, ...]: ...


class BatchRunner(Protocol):
    """`run` returns when the launch is complete; it is called from one thread."""

    def run(self, batch: Batch) -> LaunchTokens: ...


class DeviceLost(Exception):
    """The device answers no launch any more; only a new process can use it."""


class Landed(NamedTuple):
    """A launch that has ended: its tokens, or what went wrong."""

    launch: Launch
    tokens: LaunchTokens | None
    error: Exception | None
    start_s: float
    end_s: float


class _Flight(NamedTuple):
    launch: Launch
    ended: Future[Landed]


class Launcher:
    """At most one launch in flight."""

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._flight: _Flight | None = None

    def start(self, launch: Launch) -> None:
        assert self._flight is None, "one launch in flight at most"
        has_begun = threading.Event()
        self._flight = _Flight(launch, self._thread.submit(self._run, launch, has_begun))
        # Block for this moment: otherwise the loop, busy with streams, keeps the interpreter lock and the device idles.
        has_begun.wait(BEGIN_S)

    async def flies_until(self, news: asyncio.Event) -> bool:
        """True when `news` came before the launch in flight has ended; False when it has, or there is none."""
        if self._flight is None or self._flight.ended.done():
            return False
        ended = asyncio.wrap_future(self._flight.ended)
        told = asyncio.create_task(news.wait())
        both: set[asyncio.Future[Any]] = {ended, told}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            return not ended.done()
        finally:
            told.cancel()

    async def land(self) -> Landed | None:
        """Wait for the launch in flight; None when there is none. A launch never ends as an exception here."""
        if self._flight is None:
            return None
        landed = await asyncio.wrap_future(self._flight.ended)
        self._flight = None
        return landed

    def barrier(self) -> Callable[[], None]:
        """Waits, in another thread, for the launch that is in flight now, however it ends."""
        flight = self._flight

        def wait() -> None:
            if flight is not None:
                flight.ended.exception()

        return wait

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, launch: Launch, has_begun: threading.Event) -> Landed:
        start_s = time.monotonic()
        has_begun.set()
        try:
            tokens = self._runner.run(launch.batch)
        except Exception as error:  # whatever a forward pass raises concerns its own requests only
            return Landed(launch, None, error, start_s, time.monotonic())
        return Landed(launch, tokens, None, start_s, time.monotonic())
