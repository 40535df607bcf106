"""The output of one request as its caller reads it: pieces of text and tokens, until the last or an error.

The engine writes, one reader reads; what was not read yet is merged, so a slow reader gets longer pieces, never more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from session.words import SequenceId
from worker_service.core.sampling_params import SamplingParams, TokenLogprobs
from worker_service.core.sequence import FinishReason, Timing, Usage
from worker_service.stop_filter import StopFilter


class Detokenizer(Protocol):
    def add(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


@dataclass(slots=True)
class Piece:
    """New tokens and their text as far as it is certain; the last piece has the finish reason."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timing: Timing | None = None


class OutputStream:
    """One request's output: the engine pushes tokens, the caller reads pieces."""

    def __init__(
        self, sequence_id: SequenceId, detokenizer: Detokenizer, sampling: SamplingParams, now_s: float
    ) -> None:
        self.sequence_id = sequence_id
        self.is_finished = False
        self._detokenizer = detokenizer
        self._filter = StopFilter(sampling.stop)
        self._has_stop_strings = bool(sampling.stop)
        self._undecoded: list[int] = []
        # When the reader was last given something; negative before that.
        self.shown_s = -1.0
        self._shows_stop_token = sampling.include_stop_token_text
        self._arrived_s = now_s
        self._started_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._piece = Piece()
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def last_token_s(self) -> float | None:
        """Returns when the last token was sampled; None before the first."""
        return self._last_token_s

    def started(self, now_s: float) -> None:
        """Notes that the first launch with a token of this request went out."""
        self._started_s = now_s if self._started_s is None else self._started_s

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        now_s: float,
        *,
        ends_with_stop_token: bool = False,
    ) -> bool:
        """Adds tokens sampled at `now_s`; True when their text completes a stop string.

        The text of a stop token is left out unless the request asks for it. The reader sees nothing before `show`.
        """
        self._first_token_s = now_s if self._first_token_s is None else self._first_token_s
        self._last_token_s = now_s
        self._piece.token_ids.extend(token_ids)
        self._piece.logprobs.extend(item for item in logprobs if item is not None)
        hides_last = ends_with_stop_token and not self._shows_stop_token
        self._undecoded.extend(token_ids[:-1] if hides_last else token_ids)
        return self._has_stop_strings and self._decode()

    def _decode(self) -> bool:
        """Turns the tokens that have no text yet into text; later, when they are read, where no stop string may end it.

        Many at once cost less than each alone."""
        tokens, self._undecoded = self._undecoded, []
        cut = self._filter.push(self._detokenizer.add(tokens))
        self._piece.text += cut.text
        return cut.stopped

    def show(self, now_s: float) -> None:
        """Lets the reader have what was added."""
        self.shown_s = now_s
        self._news.set()

    def finish(self, reason: FinishReason, usage: Usage, *, by_stop_string: bool = False) -> Timing:
        if not by_stop_string:
            self._decode()
            cut = self._filter.push(self._detokenizer.finish())
            self._piece.text += cut.text if cut.stopped else cut.text + self._filter.flush()
        self._piece.finish_reason = reason
        self._piece.usage = usage
        moments = (self._first_token_s, self._started_s, self._last_token_s)
        self._piece.timing = Timing(
            *(0.0 if moment is None else max(0.0, moment - self._arrived_s) for moment in moments)
        )
        self.is_finished = True
        self._news.set()
        return self._piece.timing

    def fail(self, error: Exception) -> None:
        self._error = error
        self.is_finished = True
        self._news.set()

    async def next_piece(self) -> Piece:
        """Returns everything since the last call; waits until there is something.

        Raises the error that ended the request.
        """
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error
        if self._undecoded:
            self._decode()
        piece, self._piece = self._piece, Piece()
        return piece
