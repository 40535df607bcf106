"""Streams go on while the cache service says nothing: those that lack pages take them from the worker's cached prompts.

For that the worker gives up the service's state (core/own_pages.py), and giving it up costs an adoption of all pages,
5 us each in the service, when it is back. So the service has to be silent for longer than its replies usually take, and
each time for twice as long as the time before, until it has replied for a while: a service that is slow because many
workers come back to it is not given up again and again. How long an outage lasted does not count: what comes back after
a long one has as much to adopt.
"""

from __future__ import annotations

import logging

from worker_service.core.scheduler import Scheduler
from worker_service.observer import Observer
from worker_service.session_keeper import SessionKeeper
from worker_service.step_exchange import StepExchange

# Of the usual time of a reply, so that a slow network is no outage.
USUAL_REPLIES = 8
# Share of a new reply in the usual time.
NEWEST = 1 / 16
MAX_DOUBLINGS = 7
# Once replies have come over so long a time the service counts as well again.
WELL_S = 60.0
_log = logging.getLogger(__name__)


class Patience:
    """How long the cache service may be silent: at least `least_s`; for ever where that is 0."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._usual_s = 0.0
        self._doublings = 0
        # The first and the last reply since the service was given up; None while there was none.
        self._well_since_s: float | None = None
        self._well_until_s = 0.0

    def replied(self, seconds: float, now_s: float) -> None:
        """Notes how long a reply took that came now."""
        self._usual_s += (seconds - self._usual_s) * NEWEST
        if self._well_since_s is None:
            self._well_since_s = now_s
        self._well_until_s = now_s

    def lost(self) -> None:
        """Notes that the service was given up."""
        self._doublings = 1 if self._is_well() else min(self._doublings + 1, MAX_DOUBLINGS)
        self._well_since_s = None

    def seconds(self) -> float:
        """Returns how long the service may be silent now."""
        if not self._least_s:
            return float("inf")
        doublings = 0 if self._is_well() else self._doublings
        return float(max(self._least_s, USUAL_REPLIES * self._usual_s) * 2**doublings)

    def _is_well(self) -> bool:
        # By replies alone: the silence after the last one is what patience is for.
        return self._well_since_s is not None and self._well_until_s - self._well_since_s >= WELL_S


class Outages:
    """Asked in each pass of the engine's loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        exchange: StepExchange,
        session: SessionKeeper,
        observer: Observer,
        detach_after_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._exchange = exchange
        self._session = session
        self._observer = observer
        self.patience = Patience(detach_after_s)

    def go_on(self) -> bool:
        """Gives up a cache service that is silent while streams lack pages; these take them once transfers have ended.

        Returns whether something changed."""
        if self._scheduler.is_detached:
            return self._take_pages()
        if self._silent_s() < self.patience.seconds() or not self._scheduler.has_stalled_rows():
            return False
        _log.warning("the cache service has been silent for %.3g s: streams take pages by themselves", self._silent_s())
        self.patience.lost()
        self._exchange.drop()
        self._scheduler.detach()
        if self._session.epoch is not None:
            self._observer.session_lost()
            self._session.connect()
        self._take_pages()
        return True

    def time_left_s(self) -> float | None:
        """Returns the seconds until the cache service may be given up; None while that is no matter of time."""
        silent_s = self._silent_s()
        left_s = self.patience.seconds() - silent_s
        return left_s if silent_s and 0 < left_s < float("inf") and not self._scheduler.is_detached else None

    def _silent_s(self) -> float:
        """Returns for how many seconds the cache service has said nothing that is waited for."""
        return max(self._exchange.waiting_s(), self._session.away_s())

    def _take_pages(self) -> bool:
        if not self._session.is_drained or self._session.is_welcomed:
            return False
        num_taken = self._scheduler.take_pages()
        self._observer.took_pages(num_taken)
        return num_taken > 0
