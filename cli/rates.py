"""Rates: the difference between two readings of the cache service's counters.

Counters start anew with their worker, and with the service (its epoch).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from protos.v1 import cache_pb2

# Rates are over readings of this time: long enough to be steady, short enough to follow.
WINDOW_S = 10.0


class Rates(NamedTuple):
    """Rates of one worker. `hit_rate` is None while no prompt token came."""

    requests_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    computed_tokens_per_s: float = 0.0
    hit_rate: float | None = None


class _Look(NamedTuple):
    at_s: float
    stats: cache_pb2.StatsResponse


class RecentLooks:
    """The readings of the last WINDOW_S seconds; at least two once there were two."""

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque()

    def add(self, stats: cache_pb2.StatsResponse, now_s: float) -> None:
        if self._looks and self._looks[-1].stats.epoch != stats.epoch:
            self._looks.clear()
        self._looks.append(_Look(now_s, stats))
        while len(self._looks) > 2 and self._looks[1].at_s <= now_s - WINDOW_S:
            self._looks.popleft()

    def rates(self) -> dict[str, Rates]:
        """Returns rates by worker id; a worker that is not in the oldest reading counts from zero."""
        if len(self._looks) < 2:
            return {}
        oldest, newest = self._looks[0], self._looks[-1]
        seconds = newest.at_s - oldest.at_s
        before = {worker.worker_id: worker for worker in oldest.stats.workers}
        return {
            worker.worker_id: _rates(before.get(worker.worker_id), worker, seconds) for worker in newest.stats.workers
        }


def _rates(before: cache_pb2.WorkerStats | None, now: cache_pb2.WorkerStats, seconds: float) -> Rates:
    if before is None or before.incarnation != now.incarnation:
        before = cache_pb2.WorkerStats()
    prompt = now.prompt_tokens - before.prompt_tokens
    saved = now.cached_tokens + now.fetched_tokens - before.cached_tokens - before.fetched_tokens
    return Rates(
        (now.num_requests - before.num_requests) / seconds,
        prompt / seconds,
        (now.computed_tokens - before.computed_tokens) / seconds,
        saved / prompt if prompt else None,
    )
