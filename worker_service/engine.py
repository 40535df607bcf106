"""The worker's loop: while launch k runs, launch k + 1 is planned and queued behind it, and the step goes out.

    event loop   complete k-1 · step -> reply · plan and submit k+1 · deliver    complete k · step -> ...
    device       [------------------ launch k ------------------][------------ launch k+1 ------------]

The scheduler decides what runs, the launcher runs it, transfers move pages, the delivery streams tokens. Each pass of
the loop takes what has come (a reply, an ended launch, a Welcome), and starts what can be started; it waits for nothing
but news. A cache service that is slow or away stops nothing that has room; what lacks pages takes them by itself
(outage.py). One event loop owns all of this, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from session.messages import Ack
from session.words import Namespace, SequenceId
from worker_service.core.errors import Draining, SessionLost, WorkerStopped
from worker_service.core.ports import CachePort, Mover
from worker_service.core.reply_handler import Applied
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.scheduler import Scheduler
from worker_service.core.sequence import Request
from worker_service.delivery import Delivery
from worker_service.generation import Detokenizer, Generation
from worker_service.launch.launcher import Launcher, NewTokens
from worker_service.launch_meter import LaunchMeter
from worker_service.observer import Observer
from worker_service.outage import Outages
from worker_service.page_transfers import PageTransfers
from worker_service.rate_meter import RateMeter
from worker_service.session_keeper import SessionKeeper
from worker_service.step_exchange import Exchanged, StepExchange
from worker_service.trace import EngineTrace, Span

# How long an idle engine waits before it asks again for a request that was refused.
RETRY_S = 0.25
# New tokens of a launch that are shown before the step is sent.
QUICK_OUTPUTS = 8
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
    """Runs generations until it is stopped. `run` is the only task that uses the scheduler and the session."""

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
        self._cache = cache
        self._launcher = launcher
        self._observer = observer
        # Set by whatever gives the loop something to do.
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._rates = RateMeter()
        self._transfers = PageTransfers(scheduler, cache, make_mover, self._rates, self._news)
        self._mover = self._transfers.mover
        self._delivery = Delivery(scheduler, observer)
        self._exchange = StepExchange(cache, self._wake.set)
        self._session = SessionKeeper(scheduler, cache, self._mover, self._stopping, self._wake.set)
        self._outages = Outages(scheduler, self._exchange, self._session, observer, detach_after_s)
        self._numbers = itertools.count(1)
        self.trace = EngineTrace()
        self._meter = LaunchMeter(scheduler, observer, self.trace, self._rates)
        # Whether something happened that the next step may tell or ask.
        self._has_news = True
        self.connected = asyncio.Event()
        self.draining = asyncio.Event()
        # Why `run` ended, if not by `stop`.
        self.fault: BaseException | None = None

    # -- for callers --

    @property
    def epoch(self) -> str | None:
        """The present session's epoch; None while there is none."""
        return self._session.epoch

    @property
    def num_unfinished(self) -> int:
        """Returns how many requests' callers still wait for something."""
        return self._delivery.num_unfinished

    def require_room(self) -> None:
        """Raises Draining or QueueFull when no request at all would be taken now."""
        if self.draining.is_set():
            raise Draining("this worker takes no new requests")
        self.scheduler.require_room()

    def submit(self, request: EngineRequest, detokenizer: Detokenizer) -> Generation:
        """Queues a request and returns its Generation. Raises QueueFull, Draining, InvalidField."""
        self.require_room()
        sequence_id = SequenceId(next(self._numbers))
        now_s = time.monotonic()
        wanted = (request.namespace, request.prompt, request.sampling, request.priority)
        self.scheduler.add(Request(sequence_id, *wanted, now_s, request.bypass_cache))
        generation = Generation(sequence_id, detokenizer, request.sampling, now_s)
        self._delivery.add(generation)
        self._news()
        return generation

    def abort(self, generation: Generation) -> None:
        """Frees everything that an unfinished request holds; does nothing for a finished one."""
        if self._delivery.abort(generation):
            self._news()

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
        self._news()
        return DrainResult(num_before - num_aborted, num_aborted)

    def reconnect_soon(self) -> None:
        """Connects again soon: facts that Hello reported have changed."""
        self._session.ask_for_hello("this worker has news for its Hello")

    def stop(self) -> None:
        """Lets `run` end: after the launches in flight, a last step with the releases, and a Goodbye."""
        self.draining.set()
        self._stopping.set()
        self._wake.set()

    # -- the loop --

    async def run(self) -> None:
        """Serves until `stop`. Raises SessionRefused, DeviceLost, RequestFailed, or an unexpected error."""
        orders = asyncio.create_task(self._transfers.follow_orders(self._session.ask_for_hello), name="orders")
        try:
            self._session.connect()
            while not self._stopping.is_set():
                self._wake.clear()
                if self._pass():
                    # Launches that end as fast as they start would keep the loop from its sockets: streams on a CPU
                    # showed nothing for up to 390 tokens, since no Step was due that anyone would have waited for.
                    await asyncio.sleep(0)
                else:
                    await self._sleep()
            await self._flush()
        except BaseException as error:
            # At once, so that health follows before anything is waited for.
            self.fault = error
            self.draining.set()
            self._delivery.fail_all(
                WorkerStopped(f"the worker stopped: {type(error).__name__}; another one may serve this")
            )
            raise
        finally:
            orders.cancel()
            await asyncio.gather(orders, return_exceptions=True)
            await self._session.close()
            await self._exchange.close()
            await self._cache.close()
            await self._mover.close()
            self._launcher.close()

    def _pass(self) -> bool:
        """Takes what has come and starts what can be started. Returns whether there was anything."""
        has_reply = self._take_reply()
        new_tokens = self._take_launch()
        progressed = self._follow_session() or has_reply or new_tokens is not None
        progressed |= not self._stopping.is_set() and self._outages.go_on()
        # A device without work comes first. Otherwise the reply first: it may bring rows for the next launch.
        if has_reply or not self._launcher.num_in_flight:
            progressed |= self._start_launch()
        # Streaming overlaps with the launch in flight and with the step. A step takes 0.3 ms to make and to write, so a
        # few messages go before it; many would hold it up.
        if new_tokens is not None and len(new_tokens.outputs) <= QUICK_OUTPUTS:
            self._has_news |= self._delivery.deliver(new_tokens)
            new_tokens = None
        progressed |= self._send_step()
        if new_tokens is not None:
            self._has_news |= self._delivery.deliver(new_tokens)
        if not self._exchange.time_to_late_s():
            progressed |= self._start_launch()
        if not self._launcher.num_in_flight:
            self._delivery.show_due(time.monotonic(), everything=True)
        return progressed

    def _take_reply(self) -> bool:
        try:
            exchanged = self._exchange.take()
            if exchanged is None:
                return False
            applied = self.scheduler.apply(exchanged.reply)
        except SessionLost as lost:
            self._delivery.fail_each(self._session.count(lost))
            self._end_session(str(lost))
            return True
        self._follow_reply(exchanged, applied)
        return True

    def _follow_reply(self, exchanged: Exchanged, applied: Applied) -> None:
        if applied.fetches:
            # The granted pages may have been freed by sequences of launches in flight, which still write to them.
            self._transfers.fetch(applied.fetches, self._launcher.barrier())
        self._delivery.fail_each(applied.failed)
        self._session.replied()
        self._outages.patience.replied(exchanged.end_s - exchanged.start_s)
        self._has_news |= self.scheduler.num_waiting > 0 or self.scheduler.is_restoring
        for refusal in exchanged.reply.run_refusals:
            _log.warning("run %d of the inventory was refused: %s %s", refusal.run, refusal.field, refusal.detail)
        self._observer.stepped(exchanged.end_s - exchanged.start_s)
        self.trace.note(Span("step", exchanged.step_id, exchanged.start_s, exchanged.end_s))

    def _take_launch(self) -> NewTokens | None:
        """Gives the tokens of a launch that has ended to the scheduler; None when none has."""
        ended = self._launcher.take_ended()
        if ended is None:
            return None
        self._meter.ended(ended)
        if ended.results is None:
            raise ended.lost or AssertionError("a launch ends with results or with the loss of the device")
        self._delivery.fail_rows(ended)
        accepted = [(token_id,) for token_id in ended.results.token_ids]
        outputs = self.scheduler.complete(ended.launch, accepted, ended.results.errors)
        self._meter.goes_on(self.scheduler.has_running)
        self._has_news = True
        return NewTokens(ended, outputs)

    def _start_launch(self) -> bool:
        may_start = not (self._stopping.is_set() or self.scheduler.num_adopting or self._session.is_welcomed)
        if not may_start or self._launcher.num_in_flight >= self.scheduler.max_flights:
            return False
        launch = self.scheduler.next_launch()
        if launch is None:
            return False
        now_s, loop = time.monotonic(), asyncio.get_running_loop()
        self._launcher.start(launch, functools.partial(_set_soon, loop, self._wake))
        self._delivery.started(launch, now_s)
        # Decode rows ask for pages when their launch has ended, which is early enough; the next chunk asks now.
        self._has_news |= launch.batch.num_decode_seqs < launch.batch.num_seqs
        return True

    def _send_step(self) -> bool:
        # Between two launches there is nothing to say, and to find that out costs 0.3 ms. An idle engine always asks.
        may_say = self._has_news or not self._launcher.num_in_flight
        if not may_say or self._exchange.is_open or not self._session.is_open:
            return False
        self._has_news = False
        self.scheduler.report_rates(self._rates.rates())
        step = self.scheduler.next_step()
        if step is None:
            return False
        self._exchange.send(step)
        return True

    async def _sleep(self) -> None:
        """Waits for news. After RETRY_S a refused request is asked for again, even if nothing was seen to be freed."""
        is_idle = not self._launcher.num_in_flight and not self._exchange.is_open
        times = [RETRY_S if is_idle and self.scheduler.num_waiting else None, self._launcher.time_left_s()]
        # Zero is late already, and what could be done without the reply was done.
        times += [self._exchange.time_to_late_s() or None, self._outages.time_left_s()]
        try:
            async with asyncio.timeout(min((time_s for time_s in times if time_s is not None), default=None)):
                await self._wake.wait()
        except TimeoutError:
            if is_idle:
                self.scheduler.retry_refused()
                self._has_news = True

    async def _flush(self) -> None:
        """Sends the releases and acks that are due, so that the cache service keeps what it can."""
        await self._finish_launches()
        await self._mover.drain()
        while self._session.is_open:
            await self._exchange.settled()
            if not self._take_reply() and not self._send_step():
                return
            await self._mover.drain()

    async def _finish_launches(self) -> None:
        while self._launcher.num_in_flight:
            self._wake.clear()
            new_tokens = self._take_launch()
            if new_tokens is not None:
                self._delivery.deliver(new_tokens)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._launcher.time_left_s()):
                    await self._wake.wait()

    def _news(self) -> None:
        self._has_news = True
        self._wake.set()

    # -- the session --

    def _follow_session(self) -> bool:
        """Begins a new session when one is due, and follows its Welcome. Returns whether it did."""
        session = self._session
        if session.epoch is not None and session.hello_due is not None and not self._exchange.is_open:
            self._end_session(session.hello_due)
            return True
        if not session.is_welcomed or self._launcher.num_in_flight:
            return False
        try:
            readmission = session.follow()
        except SessionLost as lost:
            self._delivery.fail_each(session.count(lost))
            session.connect()
            return True
        if self.draining.is_set():
            self.scheduler.withhold_inventory()
        self._has_news = True
        self._delivery.fail_each(readmission.failed)
        if readmission.repeat is not None:
            self._exchange.send(readmission.repeat)
        self.connected.set()
        return True

    def _end_session(self, reason: str) -> None:
        _log.warning("the session ends: %s", reason)
        self._observer.session_lost()
        self._session.connect()


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Sets the event of another thread's loop."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(event.set)
