"""How fast this engine reads pages. A Lookup states it, so that the service declines what is computed sooner."""

from __future__ import annotations

import threading

# Of the latest read, in the running mean.
WEIGHT = 0.25


class FetchRate:
    """Any number of threads may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes_per_s = 0.0

    def add(self, num_bytes: int, took_s: float) -> None:
        """Counts a read of verified pages; an empty one is ignored."""
        if num_bytes <= 0 or took_s <= 0:
            return
        rate = num_bytes / took_s
        with self._lock:
            self._bytes_per_s += WEIGHT * (rate - self._bytes_per_s) if self._bytes_per_s else rate

    @property
    def bytes_per_s(self) -> float:
        """Returns the mean rate; 0 before the first read."""
        with self._lock:
            return self._bytes_per_s
