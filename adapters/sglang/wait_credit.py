"""How long SGLang's scheduler may be held for lookups."""

from __future__ import annotations

from collections.abc import Callable

# Lookups may wait for this share of the time.
WAIT_SHARE = 0.1


class WaitCredit:
    """`most_s` at once, and WAIT_SHARE of the time in all."""

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
