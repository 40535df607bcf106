"""The cases: each sends a load, has its tokens checked, and gives a row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.serving.answers import Answers
from benchmarks.serving.figures import (
    Row,
    Window,
    add_first_tokens,
    add_idle,
    add_inter_token,
    add_launches,
    inter_token_s,
    longest_silence_s,
    seconds_per_token,
    steady_window,
    tokens_in,
    whole_window,
)
from benchmarks.serving.load import SHORT_ANSWER, Sizes, cold, fresh, prompt
from benchmarks.serving.services import Services
from benchmarks.serving.streams import Clients, Request, Stream

INT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Bench:
    """What a case works with."""

    services: Services
    clients: Clients
    answers: Answers
    sizes: Sizes

    def prompt(self, length: int, number: int) -> bytes:
        return prompt(self.services.described.vocab_size, length, number)

    def requests(self, num: int, length: int, max_tokens: int, salt: str) -> list[Request]:
        return [Request(self.prompt(length, number), max_tokens, salt) for number in range(num)]

    def reusable(self, length: int) -> int:
        """Whole pages of a prompt's tokens but the last, which is always computed."""
        page = self.services.described.page_tokens
        return (length - 1) // page * page

    async def prime(self, tokens: bytes, salt: str) -> None:
        """Has these tokens' pages cached."""
        await self.clients.send([Request(tokens, 1, salt)])


async def steady_streams(bench: Bench, row: Row, is_primed: bool = False) -> None:
    """Distinct prompts sent at once; what is steady is measured while all of them decode.

    Long prompts are primed: computing them would outlast the first ones' answers, and never would all decode at once.
    """
    requests = bench.requests(row.streams, row.context, row.new_tokens, fresh(row.name))
    if is_primed:
        await bench.clients.send([request._replace(max_tokens=1) for request in requests])
    cached = bench.reusable(row.context) if is_primed else 0
    load = asyncio.create_task(bench.clients.send(requests))
    await _while_running(load, bench.clients.all_begun(row.streams))
    before, scraped_s = await bench.services.counters(), time.monotonic()
    await _while_running(load, bench.clients.one_ended())
    after = await bench.services.counters()
    streams = await load
    await bench.answers.check(row, streams, [cached] * row.streams)
    if row.failures:
        return
    add_first_tokens(row, streams)
    whole, steady = whole_window(streams), steady_window(streams, scraped_s)
    row.run_tokens_per_s = row.streams * row.new_tokens / whole.seconds
    row.detail["tokens_per_message"] = row.streams * row.new_tokens / sum(len(stream.messages) for stream in streams)
    if steady.seconds > 0:
        # The last token may have come before the scrape, and no launch after it.
        wall_s = seconds_per_token(streams, steady)
        add_launches(row, wall_s, before, after._replace(at_s=min(after.at_s, whole.end_s)))
        row.tokens_per_s = tokens_in(streams, steady) / steady.seconds
        add_inter_token(row, streams, steady)


async def _while_running(load: asyncio.Task[list[Stream]], condition: Awaitable[None]) -> None:
    """Waits for the condition, or for the load's end."""
    waiting = asyncio.ensure_future(condition)
    await asyncio.wait({load, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def _one_by_one(bench: Bench, row: Row, requests: Sequence[Request], cached: int) -> None:
    """First tokens of prompts that are alone each; the first of them warms up."""
    before = await bench.services.counters()
    streams = await bench.clients.send(requests, in_turn=True)
    after = await bench.services.counters()
    await bench.answers.check(row, streams, [cached] * len(requests))
    if not row.failures:
        add_first_tokens(row, streams[1:])
        add_idle(row, before, after)


async def prompts_alone(bench: Bench, row: Row) -> None:
    numbers = range(bench.sizes.repeats + 1)
    requests = [cold(bench.prompt(row.context, number), SHORT_ANSWER, row.name) for number in numbers]
    await _one_by_one(bench, row, requests, 0)


def _siblings(bench: Bench, num: int, round_: int = 0) -> tuple[bytes, list[bytes]]:
    """A prefix, and prompts that begin with it."""
    sizes = bench.sizes
    prefix = bench.prompt(sizes.prefix, round_)
    return prefix, [prefix + bench.prompt(sizes.own, round_ * num + number) for number in range(num)]


async def behind_prefix(bench: Bench, row: Row, is_cached: bool) -> None:
    """Prompts behind one prefix, one after the other: it is computed anew for each, or cached."""
    prefix, whole = _siblings(bench, bench.sizes.repeats + 1)
    salt = fresh(row.name)
    if is_cached:
        await bench.prime(prefix, salt)
    requests = [Request(tokens, SHORT_ANSWER, salt if is_cached else fresh(row.name)) for tokens in whole]
    await _one_by_one(bench, row, requests, bench.reusable(bench.sizes.prefix + 1) if is_cached else 0)


async def burst(bench: Bench, row: Row, is_cached: bool) -> None:
    """Prompts behind one prefix at once, several times with another prefix. Cold: one of them computes it for all."""
    streams = []
    shared = bench.reusable(bench.sizes.prefix + 1)
    for round_ in range(bench.sizes.repeats):
        salt, (prefix, whole) = fresh(row.name), _siblings(bench, row.streams, round_)
        if is_cached:
            await bench.prime(prefix, salt)
        streams += await bench.clients.send([Request(tokens, SHORT_ANSWER, salt) for tokens in whole])
    first = shared if is_cached else 0
    await bench.answers.check(row, streams, [first, *[shared] * (row.streams - 1)] * bench.sizes.repeats)
    if not row.failures:
        add_first_tokens(row, streams)


async def cached_share(bench: Bench, row: Row, percent: int) -> None:
    """A prompt alone of which the first `percent` are cached, as far as whole pages go."""
    length, requests = row.context, []
    page = bench.services.described.page_tokens
    primed = length * percent // 100 // page * page
    for number in range(bench.sizes.repeats + 1):
        whole, salt = bench.prompt(length, number), fresh(row.name)
        if primed:
            await bench.prime(whole[: primed * INT_BYTES], salt)
        requests.append(Request(whole, SHORT_ANSWER, salt))
    await _one_by_one(bench, row, requests, min(primed, bench.reusable(length)))


async def arrivals(bench: Bench, row: Row) -> None:
    """Streams that decode while prompts arrive; the inter-token times are those of the streams meanwhile."""
    sizes, clients = bench.sizes, bench.clients
    load = asyncio.create_task(clients.send(_open_ended(bench, row), open_ended=True))
    await _while_running(load, clients.all_begun(row.streams))
    quiet_from_s = time.monotonic()
    await asyncio.sleep(sizes.quiet_s)
    prompts = [
        cold(bench.prompt(sizes.arriving, number), SHORT_ANSWER, row.name)._replace(
            after_s=number * sizes.arrive_every_s
        )
        for number in range(sizes.num_arriving)
    ]
    before = await bench.services.counters()
    arrived = await clients.send_beside(prompts)
    after = await bench.services.counters()
    clients.stop()
    streams = await load
    await bench.answers.check(row, streams)
    await bench.answers.check(row, arrived, [0] * len(arrived))
    if row.failures:
        return
    add_first_tokens(row, arrived)
    quiet = Window(quiet_from_s, arrived[0].sent_s)
    add_inter_token(row, streams, Window(quiet.end_s, max(stream.messages[0].at_s for stream in arrived)))
    row.detail = {"arriving": sizes.arriving, "every_s": sizes.arrive_every_s}
    add_idle(row, before, after)
    times = inter_token_s(streams, quiet)
    if times and row.itl_ms_p99 is not None:
        quiet_ms = median(times) * 1e3
        row.detail |= {"quiet_itl_ms_p50": quiet_ms, "p99_over_quiet_p50": row.itl_ms_p99 / quiet_ms}


def _open_ended(bench: Bench, row: Row) -> list[Request]:
    return bench.requests(row.streams, row.context, row.new_tokens, fresh(row.name))


async def cache_service_stopped(bench: Bench, row: Row) -> None:
    """Streams that decode while the cache service's process stands still, and goes on; silences within that time.

    The pool is full of cached prompts before, as it is in service: no page is free to be held ahead.
    """
    sizes = bench.sizes
    num_fillers = min(-(-bench.services.pool_tokens // sizes.filler), sizes.max_fillers)
    salt = fresh(row.name)
    await bench.clients.send([Request(bench.prompt(sizes.filler, number), 1, salt) for number in range(num_fillers)])
    load = asyncio.create_task(bench.clients.send(_open_ended(bench, row), open_ended=True))
    await _while_running(load, bench.clients.all_begun(row.streams))
    quiet_from_s = time.monotonic()
    await asyncio.sleep(bench.sizes.quiet_s)
    async with bench.services.cache_service_stopped():
        stopped_s = time.monotonic()
        await asyncio.sleep(bench.sizes.stopped_s)
        resumed_s = time.monotonic()
    await asyncio.sleep(bench.sizes.resumed_s)
    ended_s = time.monotonic()
    bench.clients.stop()
    streams = await load
    await bench.answers.check(row, streams)
    if row.failures:
        return
    stopped = Window(stopped_s, resumed_s)
    add_first_tokens(row, streams)
    add_inter_token(row, streams, Window(stopped_s, ended_s))
    row.tokens_per_s = tokens_in(streams, stopped) / stopped.seconds
    quiet_s = longest_silence_s(streams, Window(quiet_from_s, stopped_s))
    row.detail = {
        "stopped_s": stopped.seconds,
        "filled_tokens": num_fillers * sizes.filler,
        "quiet_silence_ms_max": quiet_s * 1e3,
    }
