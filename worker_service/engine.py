"""The worker's loop: while launch k runs, the step for launch k + 1 goes out and its reply is applied.

    event loop     step k+1 -> reply    end k, emit     step k+2 -> reply    end k+1, emit
    model thread   [----- launch k -----]               [------ launch k+1 ------]

Knows no policy, no wire format and no tensor: the scheduler decides what runs, the launcher runs it, the mover moves
pages. One event loop owns all of this, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from session.messages import Ack, Welcome
from session.words import Namespace, SequenceId, TicketId
from worker_service.core.errors import Draining, RequestFailed, SessionLost, Unservable, WorkerStopped
from worker_service.core.ports import CachePort, Mover
from worker_service.core.reply_handler import Applied, Failed
from worker_service.core.scheduler import Launch, Output, Scheduler
from worker_service.core.sequence import FinishReason, Request, SamplingParams, TokenLogprobs, Usage
from worker_service.generation import Detokenizer, Generation
from worker_service.launch.launcher import EndedLaunch, Launcher, NewTokens
from worker_service.losses import Losses
from worker_service.observer import Observer
from worker_service.trace import EngineTrace, RateMeter, Span

# How long an idle engine waits before it asks again for a request that was refused.
RETRY_S = 0.25
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
    ) -> None:
        self.scheduler = scheduler
        self._cache = cache
        self._launcher = launcher
        self._mover = make_mover(self._on_ack)
        self._observer = observer
        self._generations: dict[SequenceId, Generation] = {}
        self._numbers = itertools.count(1)
        self._fetch_tickets: set[TicketId] = set()
        # `_wake` ends an idle engine's sleep; `_urgent` (work for the next launch) also interrupts the wait for the one
        # in flight.
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._one_ended = asyncio.Event()
        self._stopping = asyncio.Event()
        self._rates = RateMeter()
        self._losses = Losses()
        # Why the next iteration says Hello again; None when the session is fine.
        self._hello_due: str | None = None
        self.trace = EngineTrace()
        # Of the present session; None while there is none.
        self.epoch: str | None = None
        self.connected = asyncio.Event()
        self.draining = asyncio.Event()
        # Why `run` ended, if not by `stop`.
        self.fault: BaseException | None = None

    # -- for callers --

    def require_room(self) -> None:
        """Raises Draining or QueueFull when no request at all would be taken now."""
        if self.draining.is_set():
            raise Draining("this worker takes no new requests")
        self.scheduler.require_room()

    def submit(self, wish: EngineRequest, detokenizer: Detokenizer) -> Generation:
        """Queues a request and returns its Generation. Raises QueueFull, Draining, or InvalidField."""
        self.require_room()
        sequence_id = SequenceId(next(self._numbers))
        now_s = time.monotonic()
        wished = (wish.namespace, wish.prompt, wish.sampling, wish.priority)
        self.scheduler.add(Request(sequence_id, *wished, now_s, wish.bypass_cache))
        generation = Generation(sequence_id, detokenizer, wish.sampling, now_s)
        self._generations[sequence_id] = generation
        self._wake.set()
        self._urgent.set()
        return generation

    def abort(self, generation: Generation) -> None:
        """Frees everything that an unfinished request holds; does nothing for a finished one."""
        if self._forget(generation.sequence_id) is not None:
            self._observer.aborted(self.scheduler.usage(generation.sequence_id))
            self.scheduler.abort(generation.sequence_id)
            self._wake.set()

    async def drain(self, timeout_s: float) -> DrainResult:
        """Takes no new requests; waits up to `timeout_s` for the running ones, then aborts the rest."""
        self.draining.set()
        num_before = len(self._generations)
        try:
            async with asyncio.timeout(timeout_s):
                while self._generations:
                    self._one_ended.clear()
                    await self._one_ended.wait()
        except TimeoutError:
            _log.warning("%d requests were still running after %g s", len(self._generations), timeout_s)
        left = list(self._generations.values())
        for generation in left:
            self.abort(generation)
            generation.fail(Draining("the worker is shutting down"))
        return DrainResult(num_before - len(left), len(left))

    def reconnect_soon(self) -> None:
        """Facts that Hello reported have changed: connect again."""
        self._ask_for_hello("this worker has news for its Hello")

    def _ask_for_hello(self, reason: str) -> None:
        self._hello_due = reason
        self._wake.set()

    def stop(self) -> None:
        """Lets `run` end: after the launch in flight, a last step with the releases, and a Goodbye."""
        self.draining.set()
        self._stopping.set()
        self._wake.set()

    # -- the loop --

    async def run(self) -> None:
        """Serves until `stop`. Raises SessionRefused, DeviceLost, RequestFailed, or an unexpected error."""
        orders = asyncio.create_task(self._pump_orders(), name="spill-orders")
        try:
            await self._connect()
            while not self._stopping.is_set():
                await self._iterate()
            await self._flush()
        except BaseException as error:
            # At once, so that health follows before anything is waited for.
            self.fault = error
            self.draining.set()
            self._fail_all(WorkerStopped(f"the worker stopped: {type(error).__name__}; another one may serve this"))
            raise
        finally:
            orders.cancel()
            await asyncio.gather(orders, return_exceptions=True)
            await self._cache.close()
            await self._mover.close()
            self._launcher.close()

    async def _iterate(self) -> None:
        self._wake.clear()
        if self._hello_due is not None:
            await self._reconnect(self._hello_due)
            return
        try:
            has_stepped = await self._exchange()
            while self.scheduler.num_adopting:
                await self._exchange()
            while await self._launcher.interrupted_by(self._urgent):
                await self._exchange()
        except SessionLost as lost:
            self._count(lost)
            await self._reconnect(str(lost))
            return
        new_tokens = await self._complete_launch()
        launch = None if self._stopping.is_set() else self.scheduler.next_launch()
        if launch is not None:
            self._start(launch)
        if new_tokens is not None:
            # Detokenizing and streaming overlap with the next launch.
            self._deliver(new_tokens)
        elif launch is None and not has_stepped:
            await self._sleep()

    async def _exchange(self) -> bool:
        """Sends one step and applies its reply. Returns False when there was nothing to send."""
        self._urgent.clear()
        self.scheduler.report_rates(self._rates.rates())
        step = self.scheduler.next_step()
        if step is None:
            return False
        start_s = time.monotonic()
        self._follow(self.scheduler.apply(await self._cache.step(step)))
        end_s = time.monotonic()
        self._losses.reset()
        self._observer.stepped(end_s - start_s)
        self.trace.note(Span("step", step.step_id, start_s, end_s))
        return True

    def _follow(self, applied: Applied) -> None:
        for fetch in applied.fetches:
            self._fetch_tickets.add(fetch.transfer.ticket)
            # The granted pages may have been freed by sequences of the launch in flight, which still writes to them.
            self._mover.fetch(fetch.transfer, self._launcher.barrier())
        self._fail_each(applied.failed)

    def _fail_each(self, failed: Iterable[Failed]) -> None:
        for sequence_id, detail, field in failed:
            self._give_up(sequence_id, Unservable(f"{field}: {detail}"))

    def _start(self, launch: Launch) -> None:
        now_s = time.monotonic()
        self._launcher.start(launch)
        for row in launch.rows:
            if (generation := self._generations.get(row.sequence_id)) is not None:
                generation.started(now_s)

    async def _complete_launch(self) -> NewTokens | None:
        """Waits for the launch in flight and gives its tokens to the scheduler; None when there is none."""
        ended = await self._launcher.wait()
        if ended is None:
            return None
        self._note_launch(ended)
        if ended.results is None:
            raise ended.lost or AssertionError("a launch ends with results or with the loss of the device")
        rows, results = ended.launch.rows, ended.results
        accepted = [(token_id,) for token_id in results.token_ids]
        for row, error in results.errors.items():
            self._give_up(rows[row].sequence_id, RequestFailed(f"the forward pass failed: {type(error).__name__}"))
        outputs = self.scheduler.complete(ended.launch, accepted, results.errors)
        return NewTokens(ended, outputs)

    async def _finish_launch(self) -> None:
        """Waits for the launch in flight, if any, and delivers its tokens."""
        new_tokens = await self._complete_launch()
        if new_tokens is not None:
            self._deliver(new_tokens)

    def _note_launch(self, ended: EndedLaunch) -> None:
        batch, seconds = ended.launch.batch, ended.end_s - ended.start_s
        self.trace.note(Span("launch", ended.launch.number, ended.start_s, ended.end_s, batch.num_tokens))
        error = ended.lost or (ended.results.first_error if ended.results is not None else None)
        if error is not None:
            self._observer.launch_failed()
            num_failed = len(ended.results.errors) if ended.results is not None else batch.num_seqs
            what = "launch %d raised; %d of its %d rows failed"
            _log.error(what, ended.launch.number, num_failed, batch.num_seqs, exc_info=error)
            return
        self._rates.launched(batch.num_tokens - batch.num_decode_seqs, batch.num_tokens, seconds)
        self._observer.launched(batch.num_tokens, seconds)

    def _deliver(self, new_tokens: NewTokens) -> None:
        logprobs = new_tokens.logprobs()
        for output in new_tokens.outputs:
            if (generation := self._generations.get(output.sequence_id)) is not None:
                self._push(generation, output, logprobs[output.sequence_id], new_tokens.ended.end_s)

    def _push(self, generation: Generation, output: Output, logprobs: TokenLogprobs | None, now_s: float) -> None:
        since_last_s = now_s - generation.last_token_s if generation.last_token_s is not None else None
        self._observer.generated(len(output.token_ids), since_last_s)
        by_token = output.finish is FinishReason.STOP
        stopped = generation.push(output.token_ids, (logprobs,), now_s, ends_with_stop_token=by_token)
        if stopped:
            # A launch with this sequence may be in flight again; what it brings is dropped.
            usage = output.usage or self.scheduler.finish(output.sequence_id)
            assert usage is not None, "a sequence that just got a token is known"
            self._finish(generation, FinishReason.STOP, usage, by_stop_string=True)
        elif output.finish is not None and output.usage is not None:
            self._finish(generation, output.finish, output.usage, by_stop_string=False)

    def _finish(self, generation: Generation, reason: FinishReason, usage: Usage, *, by_stop_string: bool) -> None:
        timing = generation.finish(reason, usage, by_stop_string=by_stop_string)
        self._observer.finished(usage, timing)
        self._forget(generation.sequence_id)

    def _give_up(self, sequence_id: SequenceId, error: Exception) -> None:
        if (generation := self._forget(sequence_id)) is not None:
            self._observer.failed(self.scheduler.usage(sequence_id))
            generation.fail(error)

    def _fail_all(self, error: Exception) -> None:
        for sequence_id in list(self._generations):
            self._give_up(sequence_id, error)

    def _forget(self, sequence_id: SequenceId) -> Generation | None:
        self._one_ended.set()
        return self._generations.pop(sequence_id, None)

    async def _sleep(self) -> None:
        """Waits for work. After RETRY_S a refused request is asked for again, even if nothing was seen to be freed."""
        try:
            async with asyncio.timeout(RETRY_S if self.scheduler.num_waiting else None):
                await self._wake.wait()
        except TimeoutError:
            self.scheduler.retry_refused()

    async def _flush(self) -> None:
        """Sends the releases and acks that are due, so that the cache service keeps what it can."""
        await self._finish_launch()
        await self._mover.drain()
        try:
            while await self._exchange():
                await self._mover.drain()
        except SessionLost as lost:
            _log.info("the last step got no reply: %s", lost)

    # -- transfers and the session --

    def _on_ack(self, ack: Ack) -> None:
        if ack.ticket in self._fetch_tickets:
            self._fetch_tickets.discard(ack.ticket)
            self._rates.fetched(ack)
            self._urgent.set()
        self.scheduler.report(ack)
        self._wake.set()

    async def _pump_orders(self) -> None:
        while True:
            try:
                self._mover.spill(await self._cache.next_order())
            except SessionLost as lost:
                # An idle engine says nothing, so it would not notice.
                self._ask_for_hello(str(lost))

    async def _reconnect(self, reason: str) -> None:
        """Hello comes after the launch in flight and every transfer have ended: block tables no longer change."""
        _log.warning("the session ends: %s", reason)
        self.epoch = None
        self._observer.session_lost()
        # A spill order that started after the mover was drained would read pages that Hello gives to others.
        await self._cache.disconnect()
        await self._finish_launch()
        await self._connect()

    def _count(self, lost: SessionLost) -> None:
        if self._losses.count(lost):
            self._fail_each(self.scheduler.reject_step())

    async def _connect(self) -> None:
        while not self._stopping.is_set():
            await self._cache.disconnect()
            await self._mover.drain()
            await self._losses.pause(self._stopping)
            self._hello_due = None
            welcome = await self._hello()
            if welcome is None:
                return
            try:
                await self._readmit(welcome)
            except SessionLost as lost:
                self._count(lost)
                continue
            self.epoch = welcome.epoch
            self.connected.set()
            _log.info("session with the cache service", extra={"epoch": welcome.epoch})
            return

    async def _hello(self) -> Welcome | None:
        """Returns the cache service's Welcome, or None when this worker stops before there is one."""
        connecting = asyncio.create_task(self._cache.connect(self.scheduler.generation))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return connecting.result() if connecting.done() else None
        finally:
            connecting.cancel()
            stopping.cancel()
            await asyncio.gather(connecting, stopping, return_exceptions=True)

    async def _readmit(self, welcome: Welcome) -> None:
        readmission = self.scheduler.readmit(welcome)
        self._fail_each(readmission.failed)
        if readmission.repeat is not None:
            self._follow(self.scheduler.apply(await self._cache.step(readmission.repeat)))
            self._losses.reset()
