"""Texts to prompt tokens beside the event loop: in two threads with bounded queues, long texts head first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from worker_service.core.errors import InvalidField, QueueFull
from worker_service.serving.codec import VocabLimits, check_prompt_tokens, pack_tokens

# Up to here a text costs the event loop less than handing it over.
SHORT_TEXT_CHARS = 1024
# Prose has about 4 characters a token. A text with more than this for each token that a prompt may have is read by its
# head first.
LONG_CHARS_PER_TOKEN = 8
# The first head: dense texts are refused by it, prose by the next one or two.
HEAD_CHARS_PER_TOKEN = 2
# No tokenizer makes fewer tokens of a text than this; longer texts are refused without being read.
MAX_CHARS_PER_TOKEN = 128
# The last tokens of a head are other ones than those of the whole text.
CUT_TOKENS = 64
# Texts that wait for a thread of their kind, the one that is being read included.
MAX_QUEUED = 64


class Encode(Protocol):
    """The model's tokenizer. Called from threads."""

    def encode(self, text: str, *, special_tokens: bool = True) -> Sequence[int]: ...


class TextEncoder:
    """One tokenizer, with a thread for texts of usual length and one for longer ones, so that these delay no others."""

    def __init__(self, tokenizer: Encode, limits: VocabLimits, max_queued: int = MAX_QUEUED) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._head_chars = HEAD_CHARS_PER_TOKEN * limits.max_model_len
        self._long_chars = LONG_CHARS_PER_TOKEN * limits.max_model_len
        self._usual = _Lane("tokenizer", max_queued)
        self._long = _Lane("tokenizer-long", max_queued)

    async def prompt(self, text: str, *, special_tokens: bool) -> bytes:
        """The packed tokens of a prompt. Raises InvalidField when it is none of this model, QueueFull."""
        return await self._run(text, special_tokens, is_prompt=True)

    async def tokens(self, text: str, *, special_tokens: bool) -> bytes:
        """The packed tokens of any text, be it empty. Raises InvalidField for one beyond every prompt, QueueFull."""
        return await self._run(text, special_tokens, is_prompt=False)

    def close(self) -> None:
        """Texts that still wait are given up."""
        self._usual.close()
        self._long.close()

    async def _run(self, text: str, special_tokens: bool, *, is_prompt: bool) -> bytes:
        if len(text) > MAX_CHARS_PER_TOKEN * self._limits.max_model_len:
            raise InvalidField("text", f"{len(text)} characters are more than any prompt of this model has")
        if len(text) <= SHORT_TEXT_CHARS:
            return self._encode(text, special_tokens, is_prompt)
        lane = self._usual if len(text) <= self._long_chars else self._long
        return await lane.run(self._encode, text, special_tokens, is_prompt)

    def _encode(self, text: str, special_tokens: bool, is_prompt: bool) -> bytes:
        """Heads grow twofold, so all of them together are less than twice the whole text."""
        num_chars = self._head_chars if len(text) > self._long_chars else len(text)
        while num_chars < len(text):
            num_tokens = len(self._tokenizer.encode(text[:num_chars], special_tokens=special_tokens))
            if num_tokens - CUT_TOKENS >= self._limits.max_model_len:
                raise InvalidField(
                    "text",
                    f"its first {num_chars} of {len(text)} characters are {num_tokens} tokens already; "
                    f"max_model_len is {self._limits.max_model_len}",
                )
            num_chars *= 2
        packed = pack_tokens(self._tokenizer.encode(text, special_tokens=special_tokens))
        return check_prompt_tokens("text", packed, self._limits) if is_prompt else packed


class _Lane:
    """A thread and the texts that wait for it."""

    def __init__(self, name: str, max_queued: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._max_queued = max_queued
        self._num_queued = 0

    async def run(self, encode: _EncodeText, text: str, special_tokens: bool, is_prompt: bool) -> bytes:
        if self._num_queued >= self._max_queued:
            raise QueueFull(f"{self._max_queued} texts wait to be tokenized already")
        self._num_queued += 1
        future = self._thread.submit(encode, text, special_tokens, is_prompt)
        loop = asyncio.get_running_loop()
        # A text whose call was cancelled counts until the thread has come to it.
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._left))
        return await asyncio.wrap_future(future)

    def _left(self) -> None:
        self._num_queued -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class _EncodeText(Protocol):
    def __call__(self, text: str, special_tokens: bool, is_prompt: bool, /) -> bytes: ...
