"""Events until somebody takes them: what nobody takes costs a bounded memory. Knows no watcher and no cause.

Beyond the limit the oldest are dropped and counted, so that whoever takes the others can tell that there is a gap.
"""

from __future__ import annotations

from collections import deque

from cache_service.core.types import Event


class EventLog:
    def __init__(self, max_events: int) -> None:
        self._events: deque[Event] = deque(maxlen=max_events)
        self._num_lost = 0
        self._is_paused = False

    def record(self, event: Event) -> None:
        if self._is_paused:
            return
        if len(self._events) == self._events.maxlen:
            self._num_lost += 1
        self._events.append(event)

    def pause(self) -> None:
        """What happens until `resume` is told by one event that the caller records after it."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def take(self) -> tuple[Event, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events

    def take_num_lost(self) -> int:
        """How many were dropped since this was last asked; they came before those still to be taken."""
        num_lost, self._num_lost = self._num_lost, 0
        return num_lost
