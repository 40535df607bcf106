"""How long launches kept the device busy, and how long it stood idle before them, by the device's own clock."""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple

import torch

from worker_service.core.runner_port import DeviceTimes

# Events are used again after this many launches: more than can be in flight, and the one before them.
NUM_EVENTS = 8


class LaunchMarks(NamedTuple):
    """Where a launch began and ended, and where the one before it ended: events, or seconds on a CPU."""

    start: torch.cuda.Event | float
    end: torch.cuda.Event | float
    before: torch.cuda.Event | float | None


class DeviceClock:
    """`start` and `end` are called around each launch, by the thread that submits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        count = 2 * NUM_EVENTS if device.type == "cuda" else 0
        self._events = itertools.cycle([_event() for _ in range(count)])
        self._start: torch.cuda.Event | float = 0.0
        self._last_end: torch.cuda.Event | float | None = None

    def start(self) -> None:
        self._start = self._now()

    def end(self) -> LaunchMarks:
        marks = LaunchMarks(self._start, self._now(), self._last_end)
        self._last_end = marks.end
        return marks

    def _now(self) -> torch.cuda.Event | float:
        if self._device.type != "cuda":
            return time.monotonic()
        event = next(self._events)
        event.record(torch.cuda.current_stream(self._device))
        return event


def times_of(marks: LaunchMarks) -> DeviceTimes:
    """Returns the times of a launch that is complete."""
    idle_s = 0.0 if marks.before is None else _between_s(marks.before, marks.start)
    return DeviceTimes(_between_s(marks.start, marks.end), max(idle_s, 0.0))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _between_s(first: torch.cuda.Event | float, second: torch.cuda.Event | float) -> float:
    if isinstance(first, float) or isinstance(second, float):
        assert isinstance(first, float) and isinstance(second, float)
        return second - first
    return float(first.elapsed_time(second)) / 1000
