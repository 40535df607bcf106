"""The worker's loop: while launch k runs, launch k + 1 is planned and queued behind it, and the step goes out.

    event loop   complete k-1 · step -> reply · plan and submit k+1 · deliver    complete k · step -> ...
    device       [------------------ launch k ------------------][------------ launch k+1 ------------]

The scheduler decides what runs, the launcher runs it, transfers move pages, the delivery streams tokens. Each pass of
the loop takes what has come (a reply, an ended launch, a Welcome), and starts what can be started; it waits for nothing
but news. A cache service that is slow or away stops no row that has pages; rows that lack them take them by themselves
(outage.py). One event loop owns all of this, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable

from session.messages import Ack
from worker_service.core.errors import DeviceLost, SessionLost
from worker_service.core.ports import CachePort, Mover
from worker_service.core.reply_handler import Applied
from worker_service.core.scheduler import Scheduler
from worker_service.delivery import Delivery
from worker_service.launch.launcher import Launcher, NewTokens
from worker_service.launch_meter import LaunchMeter
from worker_service.observer import Observer
from worker_service.outage import Outages
from worker_service.page_transfers import PageTransfers
from worker_service.rate_meter import RateMeter
from worker_service.session_keeper import SessionKeeper
from worker_service.step_exchange import Exchanged, StepExchange
from worker_service.tasks import watched
from worker_service.trace import EngineTrace, Span

# How long an idle loop waits before it asks again for a request that was refused.
RETRY_S = 0.25
# New tokens of a launch that are shown before the step is sent.
QUICK_OUTPUTS = 8
_log = logging.getLogger(__name__)


class EngineLoop:
    """The only user of the session, the launcher and the mover."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: CachePort,
        launcher: Launcher,
        make_mover: Callable[[Callable[[Ack], None]], Mover],
        delivery: Delivery,
        observer: Observer,
        detach_after_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._launcher = launcher
        self._delivery = delivery
        self._observer = observer
        # Set by whatever gives the loop something to do.
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._rates = RateMeter()
        self._transfers = PageTransfers(scheduler, cache, make_mover, self._rates, self.news)
        self._mover = self._transfers.mover
        self._exchange = StepExchange(cache, self._wake.set)
        self._session = SessionKeeper(scheduler, cache, self._mover, self._stopping, self._wake.set)
        self._outages = Outages(scheduler, self._exchange, self._session, observer, detach_after_s)
        self.trace = EngineTrace()
        self._meter = LaunchMeter(scheduler, observer, self.trace, self._rates)
        # Whether something happened that the next step may tell or ask.
        self._has_news = True
        self._orders: asyncio.Task[None] | None = None
        # What ended a task beside the loop, which ends with it.
        self._fault: BaseException | None = None
        self.connected = asyncio.Event()
        self.draining = asyncio.Event()

    @property
    def epoch(self) -> str | None:
        """The present session's epoch; None while there is none."""
        return self._session.epoch

    def news(self) -> None:
        """Has the next pass look for something to do, and to say."""
        self._has_news = True
        self._wake.set()

    def ask_for_hello(self, reason: str) -> None:
        """Connects again as soon as no reply is awaited."""
        self._session.ask_for_hello(reason)

    def stop(self) -> None:
        """Lets `serve` end: after the launches in flight and a last step with the releases."""
        self._stopping.set()
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """Ends `serve` with this error: that of a task beside it, without which it would go on by halves."""
        self._fault = self._fault or error
        self._wake.set()

    async def serve(self) -> None:
        """Makes passes until `stop`. Raises SessionRefused, StepsRejected, DeviceLost, or an unexpected error."""
        self._orders = watched(self._transfers.follow_orders(self._session.ask_for_hello), "orders", self.fail)
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

    async def close(self) -> None:
        """Ends the session with a Goodbye, then the transfers and the launcher's threads."""
        if self._orders is not None:
            self._orders.cancel()
            await asyncio.gather(self._orders, return_exceptions=True)
        await self._session.close()
        await self._exchange.close()
        await self._cache.close()
        await self._mover.close()
        self._launcher.close()

    def _pass(self) -> bool:
        """Takes what has come and starts what can be started. Returns whether there was anything."""
        if self._fault is not None:
            raise self._fault
        has_reply = self._take_reply()
        new_tokens = self._take_launch()
        progressed = has_reply or new_tokens is not None
        if new_tokens is not None and self._session.is_welcomed:
            # Before the Welcome is followed: its limits may end these streams behind those tokens.
            self._has_news |= self._delivery.deliver(new_tokens)
            new_tokens = None
        progressed |= self._follow_session()
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
            applied = self._scheduler.apply(exchanged.reply)
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
        self._outages.patience.replied(exchanged.end_s - exchanged.start_s, exchanged.end_s)
        self._has_news |= self._scheduler.num_waiting > 0 or self._scheduler.is_restoring
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
        launch, results = ended.launch, ended.outcome
        if isinstance(results, DeviceLost):
            raise results
        self._delivery.fail_rows(launch, results)
        accepted = [(token_id,) for token_id in results.token_ids]
        outputs = self._scheduler.complete(launch, accepted, results.errors)
        self._meter.goes_on(self._scheduler.has_running)
        self._has_news = True
        return NewTokens(launch, results, ended.end_s, outputs)

    def _start_launch(self) -> bool:
        may_start = not (self._stopping.is_set() or self._scheduler.num_adopting or self._session.is_welcomed)
        if not may_start or self._launcher.num_in_flight >= self._scheduler.max_flights:
            return False
        launch = self._scheduler.next_launch()
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
        self._scheduler.report_rates(self._rates.rates())
        step = self._scheduler.next_step()
        if step is None:
            return False
        self._exchange.send(step)
        return True

    async def _sleep(self) -> None:
        """Waits for news. After RETRY_S a refused request is asked for again, even if nothing was seen to be freed."""
        is_idle = not self._launcher.num_in_flight and not self._exchange.is_open
        times = [RETRY_S if is_idle and self._scheduler.num_waiting else None, self._launcher.time_left_s()]
        # Zero is late already, and what could be done without the reply was done.
        times += [self._exchange.time_to_late_s() or None, self._outages.time_left_s()]
        try:
            async with asyncio.timeout(min((time_s for time_s in times if time_s is not None), default=None)):
                await self._wake.wait()
        except TimeoutError:
            if is_idle:
                self._scheduler.retry_refused()
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
            self._scheduler.withhold_inventory()
        self._has_news = True
        self._delivery.fail_each(readmission.failed)
        self._delivery.end_each(readmission.ended)
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
