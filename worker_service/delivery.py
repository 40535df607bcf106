"""Brings new tokens to their callers: an OutputStream for each unfinished request.

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
from worker_service.launch.launcher import NewTokens
from worker_service.launch.row_faults import RowResults
from worker_service.observer import Observer
from worker_service.output_stream import OutputStream

# Up to this number of streams, each gets a message for every token.
UNPACED_STREAMS = 64
# With more streams each waits (num_streams - UNPACED_STREAMS) / MESSAGES_PER_S between two messages.
MESSAGES_PER_S = 3000.0


class Delivery:
    def __init__(self, scheduler: Scheduler, observer: Observer) -> None:
        self._scheduler = scheduler
        self._observer = observer
        self._streams: dict[SequenceId, OutputStream] = {}
        self._one_ended = asyncio.Event()
        # With tokens that their readers were not shown yet.
        self._unshown: set[OutputStream] = set()

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    def add(self, stream: OutputStream) -> None:
        self._streams[stream.sequence_id] = stream

    def abort(self, stream: OutputStream) -> bool:
        """Drops an unfinished request and frees what it holds. Returns False when it has finished."""
        if self._forget(stream.sequence_id) is None:
            return False
        self._observer.aborted(self._scheduler.usage(stream.sequence_id))
        self._scheduler.abort(stream.sequence_id)
        return True

    def abort_all(self, error: Exception) -> int:
        """Aborts every request; their callers get the error. Returns how many there were."""
        left = list(self._streams.values())
        for stream in left:
            self.abort(stream)
            stream.fail(error)
        return len(left)

    async def all_ended(self) -> None:
        while self._streams:
            self._one_ended.clear()
            await self._one_ended.wait()

    def started(self, launch: Launch, now_s: float) -> None:
        for row in launch.rows:
            if (stream := self._streams.get(row.sequence_id)) is not None:
                stream.started(now_s)

    def deliver(self, new_tokens: NewTokens) -> bool:
        """Adds the tokens to their answers. Returns whether a stop string ended one of them."""
        num_before = len(self._streams)
        logprobs, now_s = new_tokens.logprobs(), new_tokens.end_s
        num_tokens, inter_token_s = 0, []
        for output in new_tokens.outputs:
            if (stream := self._streams.get(output.sequence_id)) is None:
                continue
            count, last_s = len(output.token_ids), stream.last_token_s
            num_tokens += count
            if last_s is not None:
                inter_token_s += [(now_s - last_s) / count] * count
            self._push(stream, output, logprobs[output.sequence_id], now_s)
        self._observer.generated(num_tokens, inter_token_s)
        self.show_due(now_s)
        return len(self._streams) < num_before

    def show_due(self, now_s: float, *, everything: bool = False) -> None:
        """Shows readers their new tokens: the first one at once, later ones merged into fewer messages.

        A message costs about 50 us of the interpreter, which also plans the launches.
        """
        if not self._unshown:
            return
        pause_s = 0.0 if everything else max(len(self._streams) - UNPACED_STREAMS, 0) / MESSAGES_PER_S
        due = [stream for stream in self._unshown if now_s - stream.shown_s >= pause_s]
        for stream in due:
            stream.show(now_s)
        self._unshown.difference_update(due)

    def fail_rows(self, launch: Launch, results: RowResults) -> None:
        """Fails the requests whose rows of a launch could not be computed."""
        for row, error in results.errors.items():
            self._fail(launch.rows[row].sequence_id, RequestFailed(f"the forward pass failed: {type(error).__name__}"))

    def fail_each(self, failed: Iterable[Failed]) -> None:
        for sequence_id, detail, field in failed:
            self._fail(sequence_id, Unservable(f"{field}: {detail}"))

    def end_each(self, ended: Iterable[Output]) -> None:
        """Ends requests that get no more tokens; each output has the reason."""
        for output in ended:
            stream = self._streams.get(output.sequence_id)
            if stream is not None and output.finish is not None and output.usage is not None:
                self._finish(stream, output.finish, output.usage, by_stop_string=False)

    def fail_all(self, error: Exception) -> None:
        for sequence_id in list(self._streams):
            self._fail(sequence_id, error)

    def _push(self, stream: OutputStream, output: Output, logprobs: TokenLogprobs | None, now_s: float) -> None:
        by_token = output.finish is FinishReason.STOP
        stopped = stream.push(output.token_ids, (logprobs,), now_s, ends_with_stop_token=by_token)
        if stopped:
            # Launches with this sequence may be in flight; what they bring is dropped.
            usage = output.usage or self._scheduler.finish(output.sequence_id)
            assert usage is not None, "a sequence that just got a token is known"
            self._finish(stream, FinishReason.STOP, usage, by_stop_string=True)
        elif output.finish is not None and output.usage is not None:
            self._finish(stream, output.finish, output.usage, by_stop_string=False)
        else:
            self._unshown.add(stream)

    def _finish(self, stream: OutputStream, reason: FinishReason, usage: Usage, *, by_stop_string: bool) -> None:
        timing = stream.finish(reason, usage, by_stop_string=by_stop_string)
        self._observer.finished(usage, timing)
        self._forget(stream.sequence_id)

    def _fail(self, sequence_id: SequenceId, error: Exception) -> None:
        if (stream := self._forget(sequence_id)) is not None:
            self._observer.failed(self._scheduler.usage(sequence_id))
            stream.fail(error)

    def _forget(self, sequence_id: SequenceId) -> OutputStream | None:
        self._one_ended.set()
        stream = self._streams.pop(sequence_id, None)
        if stream is not None:
            self._unshown.discard(stream)
        return stream
