"""Breakers of one host tier's readers: a reader that fails is paused alone; when most of them fail, all are paused."""

from __future__ import annotations

from cache_service.core.host.breaker import Breaker
from session.words import WorkerId


class Readers:
    """A breaker for each connected worker and each attached engine, and the store's own one.

    The store's opens by failures of the cache service's connection, and when more than half of the others are open.
    """

    def __init__(self, store: Breaker) -> None:
        self.store = store
        # By a worker's id or an attachment's number: at most `max_workers` and `max_attachments`.
        self.breakers: dict[WorkerId | int, Breaker] = {}

    def join(self, reader: WorkerId | int, own: Breaker) -> None:
        self.breakers[reader] = own

    def leave(self, reader: WorkerId | int) -> None:
        self.breakers.pop(reader, None)

    def is_paused(self, reader: WorkerId | int) -> bool:
        """Returns whether fetches of this reader are paused: its own transfers failed, or the store fails."""
        own = self.breakers.get(reader)
        return self.store.is_open or (own is not None and own.is_open)

    def failed(self, reader: WorkerId | int, now_ms: int) -> None:
        """Counts a failed transfer. One of a worker that is away, or has another store by now, says nothing."""
        own = self.breakers.get(reader)
        if own is None:
            return
        own.failed(now_ms)
        num_open = len([one for one in self.breakers.values() if one.is_open])
        if own.is_open and 2 * num_open > len(self.breakers):
            self.store.open(now_ms)

    def succeeded(self, reader: WorkerId | int) -> None:
        """Counts a successful transfer: it closes the breaker of the reader and that of the store."""
        own = self.breakers.get(reader)
        if own is not None:
            own.succeeded()
        self.store.succeeded()

    def tick(self, now_ms: int) -> None:
        self.store.tick(now_ms)
        for breaker in self.breakers.values():
            breaker.tick(now_ms)
