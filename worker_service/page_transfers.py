"""Moves pages between the device and the host tier: fetches that grants name, and spills that the cache service orders.

The mover carries them out (transfer/page_mover.py). Each ends in an ack, which the next step carries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from session.messages import Ack, Forget
from session.words import TicketId
from worker_service.core.errors import SessionLost
from worker_service.core.ports import CachePort, Mover
from worker_service.core.reply_handler import Fetch
from worker_service.core.scheduler import Scheduler
from worker_service.rate_meter import RateMeter


class PageTransfers:
    def __init__(
        self,
        scheduler: Scheduler,
        cache: CachePort,
        make_mover: Callable[[Callable[[Ack], None]], Mover],
        rates: RateMeter,
        on_news: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._rates = rates
        self._on_news = on_news
        self._fetch_tickets: set[TicketId] = set()
        self.mover = make_mover(self._on_ack)

    def fetch(self, fetches: Iterable[Fetch], barrier: Callable[[], None]) -> None:
        """Starts fetches; they write nothing before `barrier` returns."""
        for fetch in fetches:
            self._fetch_tickets.add(fetch.transfer.ticket)
            self.mover.fetch(fetch.transfer, barrier)

    async def follow_orders(self, on_lost: Callable[[str], None]) -> None:
        """Follows the cache service's orders until it is cancelled; `on_lost` gets why a session was lost.

        Raises what else goes wrong."""
        while True:
            try:
                order = await self._cache.next_order()
                if isinstance(order, Forget):
                    self._scheduler.forget(order)
                    self._on_news()
                else:
                    self.mover.spill(order)
            except SessionLost as lost:
                # An idle engine says nothing, so it would not notice.
                on_lost(str(lost))

    def _on_ack(self, ack: Ack) -> None:
        if ack.ticket in self._fetch_tickets:
            self._fetch_tickets.discard(ack.ticket)
            self._rates.fetched(ack)
        else:
            self._rates.spilled(ack)
        self._scheduler.report(ack)
        self._on_news()
