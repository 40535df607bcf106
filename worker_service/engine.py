"""A worker's engine as its RPCs and its bootstrap see it: submit a request and read its output; drain and stop.

What happens in between is the loop's, in engine_loop.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from session.messages import Ack
from session.words import Namespace, SequenceId
from worker_service.core.errors import Draining, WorkerStopped
from worker_service.core.ports import CachePort, Mover
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.scheduler import Scheduler
from worker_service.core.sequence import Request
from worker_service.delivery import Delivery
from worker_service.engine_loop import EngineLoop
from worker_service.launch.launcher import Launcher
from worker_service.observer import Observer
from worker_service.output_stream import Detokenizer, OutputStream

_log = logging.getLogger(__name__)


class EngineRequest(NamedTuple):
    """A generate request as the servicer decoded it; the prompt is packed int32 tokens of the model's vocabulary."""

    namespace: Namespace
    prompt: bytes
    sampling: SamplingParams
    priority: int = 0
    bypass_cache: bool = False


class DrainResult(NamedTuple):
    num_finished: int
    num_aborted: int


class Engine:
    """Runs requests until it is stopped."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: CachePort,
        launcher: Launcher,
        make_mover: Callable[[Callable[[Ack], None]], Mover],
        observer: Observer,
        detach_after_s: float = 0.0,
    ) -> None:
        self.scheduler = scheduler
        self._delivery = Delivery(scheduler, observer)
        self._loop = EngineLoop(scheduler, cache, launcher, make_mover, self._delivery, observer, detach_after_s)
        self._numbers = itertools.count(1)
        self.trace = self._loop.trace
        self.connected, self.draining = self._loop.connected, self._loop.draining
        # Why `run` ended, if not by `stop`.
        self.fault: BaseException | None = None

    @property
    def epoch(self) -> str | None:
        """The present session's epoch; None while there is none."""
        return self._loop.epoch

    @property
    def num_unfinished(self) -> int:
        """Returns how many requests' callers still wait for something."""
        return self._delivery.num_unfinished

    def require_capacity(self) -> None:
        """Raises Draining or QueueFull when no request at all would be taken now."""
        if self.draining.is_set():
            raise Draining("this worker takes no new requests")
        self.scheduler.require_capacity()

    def submit(self, request: EngineRequest, detokenizer: Detokenizer) -> OutputStream:
        """Queues a request and returns its OutputStream. Raises QueueFull, Draining, InvalidField."""
        self.require_capacity()
        sequence_id = SequenceId(next(self._numbers))
        now_s = time.monotonic()
        wanted = (request.namespace, request.prompt, request.sampling, request.priority)
        self.scheduler.add(Request(sequence_id, *wanted, request.bypass_cache))
        stream = OutputStream(sequence_id, detokenizer, request.sampling, now_s)
        self._delivery.add(stream)
        self._loop.news()
        return stream

    def abort(self, stream: OutputStream) -> None:
        """Frees everything that an unfinished request holds; does nothing for a finished one."""
        if self._delivery.abort(stream):
            self._loop.news()

    async def drain(self, timeout_s: float) -> DrainResult:
        """Takes no new requests; waits up to `timeout_s` for the running ones, then aborts the rest."""
        self.draining.set()
        num_before = self.num_unfinished
        try:
            async with asyncio.timeout(timeout_s):
                await self._delivery.all_ended()
        except TimeoutError:
            _log.warning("%d requests were still running after %g s", self.num_unfinished, timeout_s)
        num_aborted = self._delivery.abort_all(Draining("the worker is shutting down"))
        self._loop.news()
        return DrainResult(num_before - num_aborted, num_aborted)

    def reconnect_soon(self) -> None:
        """Connects again soon: facts that Hello reported have changed."""
        self._loop.ask_for_hello("this worker has news for its Hello")

    def stop(self) -> None:
        """Lets `run` end: after the launches in flight, a last step with the releases, and a Goodbye."""
        self.draining.set()
        self._loop.stop()

    def fail(self, error: BaseException) -> None:
        """Has `run` end with this error, of a task beside it that the worker cannot do without."""
        self._loop.fail(error)

    async def run(self) -> None:
        """Serves until `stop`. Raises SessionRefused, StepsRejected, DeviceLost, or an unexpected error."""
        try:
            await self._loop.serve()
        except BaseException as error:
            # At once, so that health follows before anything is waited for.
            self.fault = error
            self.draining.set()
            self._delivery.fail_all(
                WorkerStopped(f"the worker stopped: {type(error).__name__}; another one may serve this")
            )
            raise
        finally:
            await self._loop.close()
