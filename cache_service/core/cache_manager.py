"""The verbs over all workers: hello, step, adopt, goodbye, match, explain, pin, clear, tick.

Knows no clock, no transport and no thread: time comes in as `now_ms`; orders, events and host keys are taken out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from cache_service.core import adoption, leasing, overview, publishing, spilling, step_check, upkeep
from cache_service.core.device_cache import DeviceCache
from cache_service.core.errors import InvalidInput, LeasesInScope, Superseded, TooMany, UnknownWorker
from cache_service.core.event_log import EventLog
from cache_service.core.host_tiers import HostTiers
from cache_service.core.manager_config import ManagerConfig
from cache_service.core.stats import ClearResult, ManagerStats
from cache_service.core.stepping import apply_step
from cache_service.core.survey import survey
from cache_service.core.transfer_table import TicketIds
from cache_service.core.types import (
    Acquire,
    Adopt,
    Cleared,
    Event,
    Explanation,
    Extend,
    ExtendGrant,
    Grant,
    Hello,
    Namespace,
    Publish,
    Refusal,
    Release,
    Remap,
    Step,
    StepReply,
    Transfer,
    Welcome,
    WorkerId,
    WorkerMatch,
)
from cache_service.core.worker import Worker

__all__ = ["CacheManager", "ManagerConfig"]

# Superseded incarnations that are remembered for each worker id.
MAX_SUPERSEDED = 64


class CacheManager:
    """Owned by one event loop; every method is synchronous."""

    def __init__(self, config: ManagerConfig, epoch: str) -> None:
        self.config, self.epoch = config, epoch
        self.workers: dict[WorkerId, Worker] = {}
        self.tiers = HostTiers(config)
        self._superseded: dict[WorkerId, deque[str]] = {}
        self._ticket_ids = TicketIds()
        self._events = EventLog(config.max_events)

    # Sessions.

    def hello(self, hello: Hello, now_ms: int) -> Welcome:
        """The same incarnation keeps its state; a new one replaces the old, which is refused from then on."""
        step_check.check_hello(hello)
        if hello.incarnation in self._superseded.get(hello.worker_id, ()):
            raise Superseded("hello.incarnation", f"a newer incarnation of {hello.worker_id} took over")
        worker = self.workers.get(hello.worker_id)
        if worker is not None and worker.hello.incarnation == hello.incarnation:
            return self._welcome_back(worker, hello)
        if worker is None and len(self.workers) >= self.config.max_workers:
            raise TooMany("hello.worker_id", f"more than {self.config.max_workers} workers")
        if worker is not None:
            self._supersede(worker)
        record = self._events.record if self.config.watch else None
        cache = DeviceCache(hello, self.config, self.tiers.view(hello), self._ticket_ids, record)
        self.workers[hello.worker_id] = Worker(hello, cache)
        self._prune_tiers()
        return Welcome(self.epoch, (), 0)

    def _prune_tiers(self) -> None:
        self.tiers.prune({worker.hello.host_tier_id for worker in self.workers.values()})

    def _welcome_back(self, worker: Worker, hello: Hello) -> Welcome:
        old = worker.hello
        for name in ("fingerprint", "page_tokens", "groups", "num_ranks"):
            if getattr(hello, name) != getattr(old, name):
                raise InvalidInput(f"hello.{name}", "differs from what this incarnation said before")
        spilling.void(worker.cache)
        # A store may answer for the first time, or be another one than before.
        if (hello.host_tier, hello.host_tier_id) != (old.host_tier, old.host_tier_id):
            worker.cache.host = self.tiers.view(hello)
            spilling.forget_marks(worker.cache)
        worker.hello, worker.gone_since_ms = hello, None
        self._prune_tiers()
        known = tuple(sequence for sequence in hello.live_sequences if sequence in worker.cache.leases)
        return Welcome(self.epoch, known, worker.last_step_id)

    def _supersede(self, worker: Worker) -> None:
        worker_id = worker.hello.worker_id
        self._superseded.setdefault(worker_id, deque(maxlen=MAX_SUPERSEDED)).append(worker.hello.incarnation)
        while len(self._superseded) > self.config.max_workers:
            del self._superseded[next(iter(self._superseded))]
        self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        """Leases and device pages go; host copies in a shared tier stay."""
        worker_id = worker.hello.worker_id
        spilling.abandon(worker.cache)
        self.tiers.forget_worker(worker_id)
        del self.workers[worker_id]
        if self.config.watch:
            self._events.record(Cleared(worker_id))

    def disconnect(self, worker_id: WorkerId, incarnation: str, now_ms: int) -> None:
        """The stream broke; the grace period begins. A stream of another incarnation does not count."""
        worker = self.workers.get(worker_id)
        if worker is not None and worker.hello.incarnation == incarnation and worker.connected:
            worker.gone_since_ms = now_ms

    def goodbye(self, worker_id: WorkerId, now_ms: int) -> None:
        self._forget(self._worker(worker_id))
        self._prune_tiers()

    def _worker(self, worker_id: WorkerId) -> Worker:
        worker = self.workers.get(worker_id)
        if worker is None or worker.gone_since_ms is not None:
            raise UnknownWorker("worker_id", f"{worker_id!r} is not connected")
        return worker

    def step(self, worker_id: WorkerId, step: Step, now_ms: int) -> StepReply:
        """Refused whole or applied whole; a repeated step id is answered with the kept reply."""
        worker = self._worker(worker_id)
        if worker.kept_reply is not None and step.step_id == worker.last_step_id:
            return worker.kept_reply
        if step.step_id <= worker.last_step_id:
            raise InvalidInput("step.step_id", f"{step.step_id} comes after {worker.last_step_id}")
        step_check.check_step(worker.cache, step)
        reply = apply_step(worker.cache, step, now_ms)
        if step.acquires and not worker.model:
            worker.model = step.acquires[0].namespace.model
        worker.last_step_id, worker.kept_reply = step.step_id, reply
        return reply

    def adopt(self, worker_id: WorkerId, adopt: Adopt, now_ms: int) -> Grant | Refusal:
        worker = self._worker(worker_id)
        answer = adoption.adopt(worker.cache, adopt)
        worker.model = worker.model or adopt.namespace.model
        return answer

    def worker(self, worker_id: WorkerId) -> DeviceCache:
        """The device cache of a connected worker; for audits, replays and tests."""
        return self._worker(worker_id).cache

    # One verb at a time, for replays and tests; each checks, then applies.

    def acquire(self, worker_id: WorkerId, acquire: Acquire, now_ms: int) -> Grant | Refusal:
        worker = self._worker(worker_id)
        step_check.check_one_acquire(worker.cache, acquire, "acquire")
        worker.model = worker.model or acquire.namespace.model
        return leasing.acquire(worker.cache, acquire)

    def extend(self, worker_id: WorkerId, extend: Extend, now_ms: int) -> ExtendGrant | Refusal:
        cache = self._worker(worker_id).cache
        return leasing.extend(cache, step_check.check_extend(cache, extend, "extend"), extend)

    def publish(self, worker_id: WorkerId, publish: Publish, now_ms: int) -> Remap | None:
        cache = self._worker(worker_id).cache
        lease = step_check.check_publish(cache, publish, "publish")
        return publishing.publish(cache, lease, publish.tokens, publish.computed_tokens)

    def release(self, worker_id: WorkerId, release: Release, now_ms: int) -> None:
        cache = self._worker(worker_id).cache
        leasing.release(cache, step_check.known_lease(cache, release.sequence_id, "release"), release.reason)

    # For people, routers and tools.

    def match(self, namespace: Namespace, tokens: bytes, worker_id: WorkerId | None = None) -> tuple[WorkerMatch, ...]:
        """Read-only: how far each connected worker of the model could reuse the prompt."""
        step_check.check_tokens(tokens, "tokens", self.config.max_prompt_tokens)
        out = []
        for worker in self._asked(namespace, worker_id):
            cache = worker.cache
            found = survey(cache.tree, cache.layout, namespace, tokens, cache.host)
            match = found.match(cache.layout.page_tokens)
            out.append(WorkerMatch(worker.hello.worker_id, worker.hello.endpoint, match))
        return tuple(out)

    def explain(
        self, namespace: Namespace, tokens: bytes, worker_id: WorkerId | None = None
    ) -> tuple[Explanation, ...]:
        """For the operator only: may say that another salt holds the tokens."""
        step_check.check_tokens(tokens, "tokens", self.config.max_prompt_tokens)
        return tuple(overview.explain(worker, namespace, tokens) for worker in self._asked(namespace, worker_id))

    def _asked(self, namespace: Namespace, worker_id: WorkerId | None) -> Iterator[Worker]:
        if worker_id:
            yield self._worker(worker_id)
            return
        for worker in self.workers.values():
            if worker.connected and worker.model in ("", namespace.model):
                yield worker

    def pin(self, namespace: Namespace, tokens: bytes, ttl_ms: int, now_ms: int) -> int:
        """Rank the cached prefix last for so long (0 unpins); answers the most tokens on any worker."""
        step_check.check_tokens(tokens, "tokens", self.config.max_prompt_tokens)
        if ttl_ms < 0:
            raise InvalidInput("ttl_ms", "must not be negative")
        until_ms = now_ms + ttl_ms if ttl_ms else 0
        caches = [worker.cache for worker in self.workers.values()]
        return max((upkeep.pin_softly(cache, namespace, tokens, until_ms) for cache in caches), default=0)

    def clear(self, namespace: Namespace | None, unused_only: bool, now_ms: int) -> ClearResult:
        """Drop what is cached, on devices and in the host tier; with leases in scope only what nobody holds."""
        caches = [worker.cache for worker in self.workers.values()]
        if not unused_only and any(upkeep.has_holders(cache, namespace) for cache in caches):
            raise LeasesInScope("namespace", "live sequences or open spills hold pages in scope")
        if namespace is None and not unused_only and self.config.watch:
            num_pages = self._clear_all(caches)
        else:
            num_pages = sum(upkeep.drop_unused(cache, namespace) for cache in caches)
        return ClearResult(num_pages, self.tiers.clear(namespace))

    def _clear_all(self, caches: list[DeviceCache]) -> int:
        """One event says it all, after everything is gone."""
        self._events.pause()
        num_pages = sum(upkeep.drop_unused(cache, None) for cache in caches)
        self._events.resume()
        self._events.record(Cleared(None))
        return num_pages

    def stats(self) -> ManagerStats:
        workers = tuple(overview.worker_stats(worker) for worker in self.workers.values())
        return ManagerStats(self.epoch, self.config.policy, workers, self.tiers.stats())

    # Time, and what leaves.

    def tick(self, now_ms: int) -> None:
        """Grace periods, soft pins, write_back spills, breakers."""
        for worker in list(self.workers.values()):
            if worker.gone_since_ms is not None and now_ms - worker.gone_since_ms >= self.config.grace_ms:
                self._forget(worker)
                self._prune_tiers()
            else:
                upkeep.tick(worker.cache, now_ms)
        self.tiers.tick(now_ms)

    def take_orders(self, worker_id: WorkerId) -> tuple[Transfer, ...]:
        """New spill orders for this worker; each is open until its ack."""
        worker = self.workers.get(worker_id)
        return spilling.next_orders(worker.cache) if worker is not None and worker.connected else ()

    def take_events(self) -> tuple[Event, ...]:
        return self._events.take()

    def take_num_lost_events(self) -> int:
        """Events that were dropped because nobody took them in time; they came before those still to be taken."""
        return self._events.take_num_lost()

    def take_host_deletes(self) -> tuple[bytes, ...]:
        """Keys to unlink."""
        return self.tiers.take_deletes()

    def take_host_touches(self) -> tuple[bytes, ...]:
        """Keys whose time to live is to be refreshed, tails before heads."""
        return self.tiers.take_touches()

    # The host tier. `host_tier_id` is Hello.host_tier_id of a SHARED tier.

    def host_tiers(self) -> tuple[tuple[str, bytes], ...]:
        """(host_tier_id, fingerprint) of every shared tier that a worker named: what to scan and to watch."""
        shared = self.tiers.shared.items()
        return tuple((tier_id, fingerprint) for tier_id, index in shared for fingerprint in index.group_bytes)

    def host_adopted(self, host_tier_id: str, fingerprint: bytes, keys: Sequence[bytes], now_ms: int) -> int:
        """Rows found by a background scan after a restart; answers how many became findable."""
        return self.tiers.adopt(host_tier_id, fingerprint, keys)

    def host_lost(self, host_tier_id: str, now_ms: int) -> None:
        """The store was flushed or replaced: drop its index at once."""
        index = self.tiers.shared.get(host_tier_id)
        if index is None:
            return
        index.lose()
        for worker in self.workers.values():
            if worker.cache.host is not None and worker.cache.host.index is index:
                spilling.forget_marks(worker.cache)

    def report_host_failure(self, host_tier_id: str, now_ms: int) -> None:
        index = self.tiers.shared.get(host_tier_id)
        if index is not None:
            index.breaker.failed(now_ms)

    def report_host_ok(self, host_tier_id: str, now_ms: int) -> None:
        index = self.tiers.shared.get(host_tier_id)
        if index is not None:
            index.breaker.succeeded()
