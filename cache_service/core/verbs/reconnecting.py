"""What a worker still owns that comes back: all that it had, or nothing.

    the same process, and its state is here      leases, tickets and device pages as they are; spill orders are void
    the same process, from a state that is gone  nothing; what it holds it may offer: adoption.py, restoring.py
    another process, which started later         nothing, and the older one is refused from now on
    another process, which started earlier       it is refused
    anybody after the grace period               nothing

A state is named by its generation. Host copies in a shared tier stay whatever happens.
"""

from __future__ import annotations

from collections import deque

from cache_service.core.base.cleared_scopes import ClearedScopes
from cache_service.core.base.errors import Superseded
from cache_service.core.base.manager_config import ManagerConfig
from cache_service.core.base.types import Cleared
from cache_service.core.device.event_log import EventLog
from cache_service.core.device.lease_table import TokenBytes
from cache_service.core.device.transfer_table import TicketIds
from cache_service.core.device_cache import DeviceCache
from cache_service.core.host.host_tiers import HostTiers
from cache_service.core.verbs import renewal, spilling
from cache_service.core.verbs.present_state import connection
from cache_service.core.worker import Worker
from session.errors import InvalidInput, TooMany
from session.messages import Hello
from session.words import WorkerId

# Superseded incarnations that are remembered for each worker id.
MAX_SUPERSEDED = 64


class WorkerStates:
    """The state of each worker, from its first Hello until it is forgotten."""

    def __init__(self, config: ManagerConfig, tiers: HostTiers, events: EventLog, cleared: ClearedScopes) -> None:
        self._config, self._tiers, self._events, self._cleared = config, tiers, events, cleared
        self.by_id: dict[WorkerId, Worker] = {}
        self.lease_bytes = TokenBytes()
        self._ticket_ids = TicketIds()
        self._superseded: dict[WorkerId, deque[str]] = {}
        self._last_generation = 0

    def hello(self, hello: Hello, now_ms: int) -> Worker:
        """Returns the worker with the state that its Hello's generation names, or a new one; raises as the manager."""
        if hello.incarnation in self._superseded.get(hello.worker_id, ()):
            raise Superseded("hello.incarnation", f"a newer incarnation of {hello.worker_id} took over")
        self._tiers.tick(now_ms)
        worker = self.by_id.get(hello.worker_id)
        if worker is not None and worker.hello.incarnation == hello.incarnation:
            check_same(worker.hello, hello)
            if worker.generation == hello.generation:
                self._go_on(worker, hello)
                return worker
            self.forget(worker)
        elif worker is not None:
            check_later(worker.hello, hello)
            self._supersede(worker)
        elif len(self.by_id) >= self._config.max_workers:
            raise TooMany("hello.worker_id", f"more than {self._config.max_workers} workers")
        return self._begin(hello, now_ms)

    def _begin(self, hello: Hello, now_ms: int) -> Worker:
        view = self._tiers.view(hello)
        cache = DeviceCache(hello, self._config, view, self._ticket_ids, self.lease_bytes, self._events, now_ms)
        self._last_generation += 1
        worker = self.by_id[hello.worker_id] = Worker(hello, cache, self._last_generation)
        worker.first_clears = self._cleared.come_back(hello.worker_id, hello.incarnation)
        cache.restored.clear_missed(self._cleared.since(worker.first_clears))
        self._join(cache)
        self._events.record(connection(worker))
        return worker

    def _go_on(self, worker: Worker, hello: Hello) -> None:
        old = worker.hello
        spilling.end_after_broken_stream(worker.cache)
        # A store may answer for the first time, or be another one than before.
        if (hello.host_tier, hello.host_tier_id) != (old.host_tier, old.host_tier_id):
            worker.cache.set_host(self._tiers.view(hello))
            renewal.start_refill(worker.cache)
        self._join(worker.cache)
        worker.hello, worker.gone_since_ms = hello, None
        self._events.record(connection(worker))

    def _join(self, cache: DeviceCache) -> None:
        """Counts the worker's fetches among those of its host tier, while it is connected."""
        self._tiers.leave(cache.worker_id)
        if cache.host is not None:
            cache.host.index.readers.join(cache.worker_id, cache.fetch_breaker)

    def _supersede(self, worker: Worker) -> None:
        worker_id = worker.hello.worker_id
        self._superseded.setdefault(worker_id, deque(maxlen=MAX_SUPERSEDED)).append(worker.hello.incarnation)
        while len(self._superseded) > self._config.max_workers:
            del self._superseded[next(iter(self._superseded))]
        self.forget(worker)

    def leave(self, worker: Worker, now_ms: int) -> None:
        """Begins the grace period of a worker whose stream broke."""
        worker.gone_since_ms = now_ms
        self._tiers.leave(worker.hello.worker_id)
        self._events.record(connection(worker))

    def is_over(self, worker: Worker, now_ms: int) -> bool:
        """Returns whether the worker has been gone for its grace period."""
        return worker.gone_since_ms is not None and now_ms - worker.gone_since_ms >= self._config.grace_ms

    def forget(self, worker: Worker) -> None:
        """Drops the worker's leases, tickets and device pages; host copies in a shared tier stay."""
        worker_id = worker.hello.worker_id
        del self.by_id[worker_id]
        self._cleared.leave(worker_id, worker.hello.incarnation, worker.met_clears(self._cleared.number))
        for event in (connection(worker)._replace(is_connected=False), Cleared(worker_id)):
            self._events.record(event)
        spilling.end_all(worker.cache)
        worker.cache.leases.forget()
        self._tiers.forget_worker(worker_id)


def check_later(present: Hello, new: Hello) -> None:
    """Raises Superseded where the new process started before the present one; a start of 0 is not known."""
    if present.started_ns and 0 < new.started_ns < present.started_ns:
        ahead_s = (present.started_ns - new.started_ns) / 1e9
        reason = f"an incarnation of {new.worker_id} that started {ahead_s:.3f} s later is here"
        raise Superseded("hello.incarnation", reason)


def check_same(old: Hello, new: Hello) -> None:
    """Raises InvalidInput where a process declares other pages than before."""
    for name in ("fingerprint", "page_tokens", "groups", "num_ranks", "model"):
        if getattr(new, name) != getattr(old, name):
            raise InvalidInput(f"hello.{name}", "differs from what this incarnation said before")
