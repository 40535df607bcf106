"""Measures ended launches: device time and idle time, the rates that the cache service gets, failures."""

from __future__ import annotations

import logging

from worker_service.core.errors import DeviceLost
from worker_service.core.scheduler import Scheduler
from worker_service.launch.launcher import EndedLaunch
from worker_service.observer import Observer
from worker_service.rate_meter import RateMeter
from worker_service.trace import EngineTrace, Span

_log = logging.getLogger(__name__)


class LaunchMeter:
    def __init__(self, scheduler: Scheduler, observer: Observer, trace: EngineTrace, rates: RateMeter) -> None:
        self._scheduler = scheduler
        self._observer = observer
        self._trace = trace
        self._rates = rates
        self._goes_on = False

    def ended(self, ended: EndedLaunch) -> None:
        """Notes a launch before the scheduler has its results."""
        batch = ended.launch.batch
        self._trace.note(Span("launch", ended.launch.number, ended.start_s, ended.end_s, batch.num_tokens))
        error = ended.outcome if isinstance(ended.outcome, DeviceLost) else ended.outcome.first_error
        if error is not None:
            self._note_failure(ended, error)
            return
        busy_s, idle_s = ended.times or (ended.end_s - ended.start_s, 0.0)
        self._rates.launched(batch.num_tokens - batch.num_decode_seqs, batch.num_tokens, busy_s)
        self._observer.launched(batch.num_tokens, busy_s, idle_s if self._goes_on else 0.0)

    def goes_on(self, has_running: bool) -> None:
        """Tells whether sequences run on: then the device idles, until the next launch, because of the host."""
        self._goes_on = has_running

    def _note_failure(self, ended: EndedLaunch, error: Exception) -> None:
        num_seqs = ended.launch.batch.num_seqs
        failed = range(num_seqs) if isinstance(ended.outcome, DeviceLost) else ended.outcome.errors
        if failed and not any(self._scheduler.usage(ended.launch.rows[row].sequence_id) for row in failed):
            return  # it was queued before the launch ahead of it failed, and only had rows of the same requests
        self._observer.launch_failed()
        what = "launch %d raised; %d of its %d rows failed"
        _log.error(what, ended.launch.number, len(failed), num_seqs, exc_info=error)
