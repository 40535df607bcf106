"""The time for which lookups may hold SGLang's scheduler: a budget that refills as time passes."""

from __future__ import annotations

from collections.abc import Callable

# Lookups may wait for this share of the time.
WAIT_SHARE = 0.1


class LookupBudget:
    """`most_s` at once, and WAIT_SHARE of the time in all. Enter it to get the seconds that are left; what passes
    until the exit is spent."""

    def __init__(self, most_s: float, clock: Callable[[], float]) -> None:
        self._most_s, self._clock = most_s, clock
        self._left_s, self._at_s = most_s, clock()

    def __enter__(self) -> float:
        now_s = self._clock()
        self._left_s = min(self._most_s, self._left_s + WAIT_SHARE * (now_s - self._at_s))
        self._at_s = now_s
        return max(self._left_s, 0.0)

    def __exit__(self, *_: object) -> None:
        now_s = self._clock()
        self._left_s -= now_s - self._at_s
        self._at_s = now_s
