"""What is computed of streams and counters: pure functions, and the row that a case gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from benchmarks.serving.streams import Stream


class Counters(NamedTuple):
    """The worker's counters at one moment; None where this worker has no such counter.

    device_s: that launches kept the device busy. idle_s: that the device waited while there was work.
    """

    at_s: float
    launches: float | None = None
    device_s: float | None = None
    idle_s: float | None = None


class Window(NamedTuple):
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(slots=True)
class Row:
    """A case's figures; None is not measured. A row with failures has none.

    wall_ms, device_ms: of one launch. idle_share: of the time, without a launch on the device. cached_tokens: of one
    prompt, the median. compared: streams whose tokens were held against the same prompt's in another run, `alone` of
    them against a cold run by itself.
    """

    name: str
    kind: str
    streams: int
    context: int
    new_tokens: int
    cached_tokens: int = 0
    wall_ms: float | None = None
    device_ms: float | None = None
    idle_share: float | None = None
    tokens_per_s: float | None = None
    run_tokens_per_s: float | None = None
    ttft_ms_p50: float | None = None
    ttft_ms_min: float | None = None
    ttft_ms_max: float | None = None
    itl_ms_p50: float | None = None
    itl_ms_p99: float | None = None
    silence_ms_max: float | None = None
    detail: dict[str, float] = field(default_factory=dict)
    compared: int = 0
    alone: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: str = ""


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that at least `percent` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def steady_window(streams: Sequence[Stream], not_before_s: float = 0.0) -> Window:
    """From the last stream's first token to the first stream's last token: all of them decode."""
    begun = max(stream.messages[0].at_s for stream in streams)
    ended = min(stream.messages[-1].at_s for stream in streams)
    return Window(max(begun, not_before_s), ended)


def whole_window(streams: Sequence[Stream]) -> Window:
    return Window(min(stream.sent_s for stream in streams), max(stream.messages[-1].at_s for stream in streams))


def tokens_in(streams: Sequence[Stream], window: Window) -> int:
    """Tokens that came within the window, its start excluded."""
    return sum(_tokens_at(stream, window.end_s) - _tokens_at(stream, window.start_s) for stream in streams)


def _tokens_at(stream: Stream, at_s: float) -> int:
    return max((message.num_tokens for message in stream.messages if message.at_s <= at_s), default=0)


def inter_token_s(streams: Sequence[Stream], window: Window) -> list[float]:
    """One value for each token; tokens of one message share the time since the message before in equal parts."""
    return [
        (after.at_s - before.at_s) / (after.num_tokens - before.num_tokens)
        for stream in streams
        for before, after in pairwise(stream.messages)
        if before.at_s >= window.start_s and after.at_s <= window.end_s
        for _ in range(after.num_tokens - before.num_tokens)
    ]


def longest_silence_s(streams: Sequence[Stream], window: Window) -> float:
    """The longest time without a message, of any stream, that touches the window; one that lasts ends with it."""
    silences = (end_s - start_s for stream in streams for start_s, end_s in _silences(stream, window))
    return max(silences, default=0.0)


def _silences(stream: Stream, window: Window) -> Iterator[tuple[float, float]]:
    moments = [message.at_s for message in stream.messages]
    if not stream.is_finished:
        moments.append(max(window.end_s, moments[-1]))
    for before, after in pairwise(moments):
        if after >= window.start_s and before <= window.end_s:
            yield before, after


def add_first_tokens(row: Row, streams: Sequence[Stream]) -> None:
    times = [stream.ttft_s * 1e3 for stream in streams]
    row.ttft_ms_p50, row.ttft_ms_min, row.ttft_ms_max = median(times), min(times), max(times)


def add_inter_token(row: Row, streams: Sequence[Stream], window: Window) -> None:
    times = inter_token_s(streams, window)
    if times:
        row.itl_ms_p50, row.itl_ms_p99 = median(times) * 1e3, percentile(times, 99) * 1e3
        row.silence_ms_max = longest_silence_s(streams, window) * 1e3


def seconds_per_token(streams: Sequence[Stream], window: Window) -> float | None:
    """Returns the mean time between two tokens of a stream; None where no stream has two messages in the window.

    From message to message, so that no launch counts in part: while all streams decode, a token is a launch.
    """
    within = [[m for m in stream.messages if window.start_s <= m.at_s <= window.end_s] for stream in streams]
    num_tokens = sum(messages[-1].num_tokens - messages[0].num_tokens for messages in within if messages)
    seconds = sum(messages[-1].at_s - messages[0].at_s for messages in within if messages)
    return seconds / num_tokens if num_tokens else None


def add_launches(row: Row, wall_s: float | None, before: Counters, after: Counters) -> None:
    """wall_s: of one launch. The counters are of two moments with launches throughout. The share of the time without a
    launch on the device is idle."""
    if wall_s is None:
        return
    row.wall_ms = wall_s * 1e3
    if before.launches is None or after.launches is None or after.launches <= before.launches:
        return
    if before.device_s is not None and after.device_s is not None:
        device_s = (after.device_s - before.device_s) / (after.launches - before.launches)
        row.device_ms, row.idle_share = device_s * 1e3, 1 - device_s / wall_s
    seconds = after.at_s - before.at_s
    if before.idle_s is not None and after.idle_s is not None and seconds > 0:
        row.detail["idle_share_by_worker"] = (after.idle_s - before.idle_s) / seconds


def add_idle(row: Row, before: Counters, after: Counters) -> None:
    """The share of the time with work in which the device waited for the host, by the worker's own count."""
    if before.device_s is None or after.device_s is None or before.idle_s is None or after.idle_s is None:
        return
    busy_s, idle_s = after.device_s - before.device_s, after.idle_s - before.idle_s
    if busy_s + idle_s > 0:
        row.detail["idle_share_of_work"] = idle_s / (busy_s + idle_s)


def idle_percent(share: float | None) -> str:
    """Returns the share as it is shown. The times of a launch and of the device are not of the very same moments: of a
    device that is never idle the share is a little more or less than nothing, and less is shown as nothing."""
    return "" if share is None else f"{max(0.0, share):.1%}"


def without_figures(row: Row) -> Row:
    """The row of a case that failed its checks."""
    kept = (row.name, row.kind, row.streams, row.context, row.new_tokens)
    return Row(*kept, compared=row.compared, alone=row.alone, failures=row.failures, skipped=row.skipped)
