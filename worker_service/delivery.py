"""Brings new tokens to their callers: a Generation for each unfinished request.

Stop strings end a request here, since the scheduler has no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from session.words import SequenceId
from worker_service.core.errors import RequestFailed, Unservable
from worker_service.core.launches import Launch, Output
from worker_service.core.reply_handler import Failed
from worker_service.core.sampling_params import TokenLogprobs
from worker_service.core.scheduler import Scheduler
from worker_service.core.sequence import FinishReason, Usage
from worker_service.generation import Generation
from worker_service.launch.launcher import EndedLaunch, NewTokens
from worker_service.observer import Observer

# Up to this number of streams, each gets a message for every token.
UNPACED_STREAMS = 64
# With more streams each waits (num_streams - UNPACED_STREAMS) / MESSAGES_PER_S between two messages.
MESSAGES_PER_S = 3000.0


class Delivery:
    def __init__(self, scheduler: Scheduler, observer: Observer) -> None:
        self._scheduler = scheduler
        self._observer = observer
        self._generations: dict[SequenceId, Generation] = {}
        self._one_ended = asyncio.Event()
        # With tokens that their readers were not shown yet.
        self._unshown: set[Generation] = set()

    @property
    def num_unfinished(self) -> int:
        return len(self._generations)

    def add(self, generation: Generation) -> None:
        self._generations[generation.sequence_id] = generation

    def abort(self, generation: Generation) -> bool:
        """Drops an unfinished request and frees what it holds. Returns False when it has finished."""
        if self._forget(generation.sequence_id) is None:
            return False
        self._observer.aborted(self._scheduler.usage(generation.sequence_id))
        self._scheduler.abort(generation.sequence_id)
        return True

    def abort_all(self, error: Exception) -> int:
        """Aborts every request; their callers get the error. Returns how many there were."""
        left = list(self._generations.values())
        for generation in left:
            self.abort(generation)
            generation.fail(error)
        return len(left)

    async def all_ended(self) -> None:
        while self._generations:
            self._one_ended.clear()
            await self._one_ended.wait()

    def started(self, launch: Launch, now_s: float) -> None:
        for row in launch.rows:
            if (generation := self._generations.get(row.sequence_id)) is not None:
                generation.started(now_s)

    def deliver(self, new_tokens: NewTokens) -> bool:
        """Adds the tokens to their answers. Returns whether a stop string ended one of them."""
        num_before = len(self._generations)
        logprobs, now_s = new_tokens.logprobs(), new_tokens.ended.end_s
        num_tokens, inter_token_s = 0, []
        for output in new_tokens.outputs:
            if (generation := self._generations.get(output.sequence_id)) is None:
                continue
            count, last_s = len(output.token_ids), generation.last_token_s
            num_tokens += count
            if last_s is not None:
                inter_token_s += [(now_s - last_s) / count] * count
            self._push(generation, output, logprobs[output.sequence_id], now_s)
        self._observer.generated(num_tokens, inter_token_s)
        self.show_due(now_s)
        return len(self._generations) < num_before

    def show_due(self, now_s: float, *, everything: bool = False) -> None:
        """Shows readers their new tokens: the first one at once, later ones merged into fewer messages.

        A message costs about 50 us of the interpreter, which also plans the launches.
        """
        if not self._unshown:
            return
        pause_s = 0.0 if everything else max(len(self._generations) - UNPACED_STREAMS, 0) / MESSAGES_PER_S
        due = [generation for generation in self._unshown if now_s - generation.shown_s >= pause_s]
        for generation in due:
            generation.show(now_s)
        self._unshown.difference_update(due)

    def fail_rows(self, ended: EndedLaunch) -> None:
        """Fails the requests whose rows of a launch could not be computed."""
        if ended.results is not None:
            for row, error in ended.results.errors.items():
                failed = RequestFailed(f"the forward pass failed: {type(error).__name__}")
                self._fail(ended.launch.rows[row].sequence_id, failed)

    def fail_each(self, failed: Iterable[Failed]) -> None:
        for sequence_id, detail, field in failed:
            self._fail(sequence_id, Unservable(f"{field}: {detail}"))

    def end_each(self, ended: Iterable[Output]) -> None:
        """Ends requests that get no more tokens; each output has the reason."""
        for output in ended:
            generation = self._generations.get(output.sequence_id)
            if generation is not None and output.finish is not None and output.usage is not None:
                self._finish(generation, output.finish, output.usage, by_stop_string=False)

    def fail_all(self, error: Exception) -> None:
        for sequence_id in list(self._generations):
            self._fail(sequence_id, error)

    def _push(self, generation: Generation, output: Output, logprobs: TokenLogprobs | None, now_s: float) -> None:
        by_token = output.finish is FinishReason.STOP
        stopped = generation.push(output.token_ids, (logprobs,), now_s, ends_with_stop_token=by_token)
        if stopped:
            # Launches with this sequence may be in flight; what they bring is dropped.
            usage = output.usage or self._scheduler.finish(output.sequence_id)
            assert usage is not None, "a sequence that just got a token is known"
            self._finish(generation, FinishReason.STOP, usage, by_stop_string=True)
        elif output.finish is not None and output.usage is not None:
            self._finish(generation, output.finish, output.usage, by_stop_string=False)
        else:
            self._unshown.add(generation)

    def _finish(self, generation: Generation, reason: FinishReason, usage: Usage, *, by_stop_string: bool) -> None:
        timing = generation.finish(reason, usage, by_stop_string=by_stop_string)
        self._observer.finished(usage, timing)
        self._forget(generation.sequence_id)

    def _fail(self, sequence_id: SequenceId, error: Exception) -> None:
        if (generation := self._forget(sequence_id)) is not None:
            self._observer.failed(self._scheduler.usage(sequence_id))
            generation.fail(error)

    def _forget(self, sequence_id: SequenceId) -> Generation | None:
        self._one_ended.set()
        generation = self._generations.pop(sequence_id, None)
        if generation is not None:
            self._unshown.discard(generation)
        return generation
