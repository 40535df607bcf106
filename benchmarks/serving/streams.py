"""Generate calls from processes other than the services': what was sent, and when which token arrived.

Several processes: a message costs one some 80 us of CPU, and 256 streams bring 15,000 and more a second.
Times are time.monotonic(), which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from cli.client import Answer, StemcacheClient, greedy
from rpc.lifecycle import run

# From handing out the work to the first call; the processes open their channels meanwhile.
LEAD_S = 0.15
WATCH_S = 0.005


class Request(NamedTuple):
    """One request: packed int32 tokens, sent `after_s` after the others of its load."""

    prompt: bytes
    max_tokens: int
    salt: str
    after_s: float = 0.0


class Message(NamedTuple):
    """When a message came, and how many tokens there were with it."""

    at_s: float
    num_tokens: int


@dataclass(slots=True)
class Stream:
    """What the client saw of one request. `error` is empty unless the call failed."""

    request: Request
    sent_s: float = 0.0
    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    computed_tokens: int = 0
    is_finished: bool = False
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return self.messages[-1].num_tokens if self.messages else 0

    @property
    def ttft_s(self) -> float:
        return self.messages[0].at_s - self.sent_s if self.messages else float("inf")


class Marks(NamedTuple):
    """Shared by all processes: streams with a first token, streams at their end, and a request to end all."""

    begun: Any
    ended: Any
    stop: Any


class Clients:
    """The client processes. One load runs at a time, beside it further ones that count nothing."""

    def __init__(self, worker: str, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._marks = Marks(context.Value("i", 0), context.Value("i", 0), context.Event())
        self._worker = worker
        self._num_processes = num_processes
        # One more, for prompts that arrive while all the others have streams.
        self._pool = ProcessPoolExecutor(num_processes + 1, context, _set_up, (self._marks,))

    def close(self) -> None:
        """Does not wait for calls that still run: the services' end ends them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def send(
        self, requests: Sequence[Request], *, in_turn: bool = False, open_ended: bool = False
    ) -> list[Stream]:
        """Sends all at once, or each after the end of the one before; in the order of `requests`.

        With `open_ended` the streams end at `stop`. Calls that fail are streams with an error.
        """
        self._marks.begun.value = self._marks.ended.value = 0
        self._marks.stop.clear()
        return await self._send(requests, 1 if in_turn else self._num_processes, in_turn, open_ended, counts=True)

    async def send_beside(self, requests: Sequence[Request]) -> list[Stream]:
        """Sends each at its own time while the streams of `send` run."""
        return await self._send(requests, 1, False, False, counts=False)

    async def _send(
        self, requests: Sequence[Request], num_parts: int, in_turn: bool, open_ended: bool, *, counts: bool
    ) -> list[Stream]:
        loop, start_s = asyncio.get_running_loop(), time.monotonic() + LEAD_S
        num_parts = min(num_parts, len(requests))
        load = (self._worker, start_s, in_turn, open_ended, counts)
        parts = [
            loop.run_in_executor(self._pool, _run_part, list(requests[number::num_parts]), *load)
            for number in range(num_parts)
        ]
        streams: list[Stream | None] = [None] * len(requests)
        for number, part in enumerate(await asyncio.gather(*parts)):
            streams[number::num_parts] = part
        return [stream for stream in streams if stream is not None]

    async def all_begun(self, num_streams: int) -> None:
        """Waits until `num_streams` streams have a first token, or one has ended."""
        while self._marks.begun.value < num_streams and not self._marks.ended.value:  # noqa: ASYNC110 - in shared memory
            await asyncio.sleep(WATCH_S)

    async def one_ended(self) -> None:
        while not self._marks.ended.value:  # noqa: ASYNC110 - in shared memory
            await asyncio.sleep(WATCH_S)

    def stop(self) -> None:
        """Ends the streams of an open-ended load."""
        self._marks.stop.set()


_marks: Marks


def _set_up(marks: Marks) -> None:
    global _marks
    _marks = marks
    # A collection that walks every imported module would show as an inter-token latency.
    gc.collect()
    gc.freeze()


def _run_part(
    requests: list[Request], worker: str, start_s: float, in_turn: bool, open_ended: bool, counts: bool
) -> list[Stream]:
    return run(_part(requests, worker, start_s, in_turn, open_ended, counts))


async def _part(
    requests: list[Request], worker: str, start_s: float, in_turn: bool, open_ended: bool, counts: bool
) -> list[Stream]:
    streams = [Stream(request) for request in requests]
    async with StemcacheClient("", (worker,)) as client:
        await client.describe(worker)  # the connection is there before the clock starts
        await asyncio.sleep(max(0.0, start_s - time.monotonic()))
        if in_turn:
            for stream in streams:
                await _follow(client, worker, stream, counts)
            return streams
        tasks = [asyncio.create_task(_follow(client, worker, stream, counts)) for stream in streams]
        await (_until_stopped(tasks) if open_ended else asyncio.gather(*tasks))
    return streams


async def _until_stopped(tasks: list[asyncio.Task[None]]) -> None:
    while not (_marks.stop.is_set() or all(task.done() for task in tasks)):  # noqa: ASYNC110 - in shared memory
        await asyncio.sleep(WATCH_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(client: StemcacheClient, worker: str, stream: Stream, counts: bool) -> None:
    """Fills in `stream` as its answer grows."""
    request = stream.request

    def note(answer: Answer) -> None:
        if len(answer.token_ids) == stream.num_tokens:
            return
        if counts and not stream.messages:
            _add(_marks.begun)
        stream.messages.append(Message(time.monotonic(), len(answer.token_ids)))
        stream.token_ids = answer.token_ids

    await asyncio.sleep(request.after_s)
    prompt = array("i")
    prompt.frombytes(request.prompt)
    stream.sent_s = time.monotonic()
    try:
        answer = await client.generate(worker, prompt, greedy(request.max_tokens), salt=request.salt, on_answer=note)
    except grpc.RpcError as error:
        stream.error = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else repr(error)
    else:
        stream.is_finished = True
        stream.cached_tokens, stream.computed_tokens = answer.usage.cached_tokens, answer.usage.computed_tokens
    finally:
        if counts:
            _add(_marks.ended)


def _add(count: Any) -> None:
    with count.get_lock():
        count.value += 1


def packed(tokens: Sequence[int]) -> bytes:
    """Returns token ids as the protocol has them."""
    return array("i", tokens).tobytes()
