"""When evicted pages went, for Explain: the ghost table's count of time, translated into milliseconds.

A ghost's mark has no time, only the number of the *unit* in which its pages went; a unit ends when another sixteenth of
the pool was evicted. Each tick notes the present unit, so a unit has the times of the first and last tick that saw it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import NamedTuple

# Marks reach back 1,024 units (`ghost_table`), and one sample before the oldest is needed.
MOST_SAMPLES = 1_026


class Window(NamedTuple):
    """What happened came after the one time and not after the other; None: maybe after the last tick."""

    after_ms: int
    until_ms: int | None


class UnitTimes:
    """Samples of one worker, made at `start_ms`; most of them take 24 KiB.

    A unit begins with a cut, but for the first one, which begins with the last tick before any.
    """

    def __init__(self, start_ms: int) -> None:
        self._start_ms = start_ms
        self._units = array("q")  # rising
        self._first_ms = array("q")  # of the first tick that saw the unit
        self._last_ms = array("q")  # and of the last one
        self._cut_pages = 0  # at the last tick
        self._still_ms = start_ms  # of the first tick that saw as many

    def seen(self, unit: int, cut_pages: int, now_ms: int) -> None:
        """Records the ghost table's present unit, and how many pages were cut up to now. A lower unit than the last one
        means that the table began anew."""
        units = self._units
        if not cut_pages:
            self._start_ms = now_ms
        if cut_pages != self._cut_pages:
            self._cut_pages, self._still_ms = cut_pages, now_ms
        if units and units[-1] == unit:
            self._last_ms[-1] = now_ms
            return
        if units and units[-1] > unit:
            self._start_ms = self._last_ms[-1]
            self._drop(len(units))
        units.append(unit)
        self._first_ms.append(now_ms)
        self._last_ms.append(now_ms)
        self._drop(max(len(units) - MOST_SAMPLES, 0))

    def _drop(self, num_oldest: int) -> None:
        for samples in (self._units, self._first_ms, self._last_ms):
            del samples[:num_oldest]

    def window(self, unit: int, cut_pages: int) -> Window:
        """Returns when pages were cut in that unit; `cut_pages` counts all that were cut up to now.

        The true times lie within. It begins at most a tick early. In the present unit it ends with the last cut, at
        most a tick late; an earlier one ends at most a tick after its own end.
        """
        at = bisect_left(self._units, unit)
        after_ms = self._last_ms[at - 1] if at else self._start_ms
        if at < len(self._units) and self._units[at] == unit:
            at += 1
        if at < len(self._units):
            return Window(after_ms, self._first_ms[at])
        return Window(after_ms, self._still_ms if cut_pages == self._cut_pages else None)
