"""A circuit breaker: what failed is not asked again before a pause is over, so an engine does not wait for it twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """Open for `pause_s` after each failure. Any number of threads may ask."""

    def __init__(self, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s, self._clock = pause_s, clock
        self._lock = threading.Lock()
        self._closed_from_s = clock()
        self.num_failures = 0

    @property
    def is_open(self) -> bool:
        """Returns whether nothing should be asked now."""
        with self._lock:
            return self._clock() < self._closed_from_s

    def failed(self) -> None:
        with self._lock:
            self.num_failures += 1
            self._closed_from_s = self._clock() + self._pause_s
