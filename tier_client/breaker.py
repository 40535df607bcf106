"""A circuit breaker: what failed is not asked again before a pause is over, so an engine does not wait for it twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """Open for `pause_s` after `failures_to_open` failures in a row, and after each further one.

    Any number of threads may ask.
    """

    def __init__(self, pause_s: float, failures_to_open: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s, self._failures_to_open, self._clock = pause_s, failures_to_open, clock
        self._lock = threading.Lock()
        self._closed_from_s = clock()
        self._failures = 0

    @property
    def is_open(self) -> bool:
        """Returns whether nothing should be asked now."""
        with self._lock:
            return self._clock() < self._closed_from_s

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._failures >= self._failures_to_open:
                self._closed_from_s = self._clock() + self._pause_s

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0
