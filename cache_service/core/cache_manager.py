"""The verbs over all workers: hello, step, goodbye, match, explain, pin, clear, tick.

Time comes in as `now_ms`; orders, events and host keys are taken out.
"""

from __future__ import annotations

from collections.abc import Generator

from cache_service.core.attachments.attachments import Attachments
from cache_service.core.base.cleared_scopes import ClearedScopes
from cache_service.core.base.errors import LeasesInScope, UnknownWorker
from cache_service.core.base.manager_config import ManagerConfig
from cache_service.core.base.stats import ManagerStats
from cache_service.core.base.types import Cleared, Event, Explanation, WorkerMatch
from cache_service.core.device.event_log import EventLog
from cache_service.core.device.eviction_order import make_policy
from cache_service.core.device_cache import DeviceCache
from cache_service.core.host.host_tiers import HostTiers
from cache_service.core.verbs import clearing, explaining, renewal, spilling, step_check, stepping, upkeep
from cache_service.core.verbs.many_workers_match import PromptMatch
from cache_service.core.verbs.present_state import present_state
from cache_service.core.verbs.reconnecting import WorkerStates
from cache_service.core.verbs.worker_stats import worker_stats
from cache_service.core.worker import Worker
from session.errors import InvalidInput, TooMany
from session.hello_check import check_hello
from session.limits import SessionLimits
from session.messages import (
    Acquire,
    Extend,
    ExtendGrant,
    Forget,
    Grant,
    Hello,
    Publish,
    Refusal,
    Release,
    Remap,
    Step,
    StepReply,
    Welcome,
)
from session.protocol import CAPABILITIES
from session.words import Namespace, Transfer, WorkerId

__all__ = ["CacheManager", "ManagerConfig"]


class CacheManager:
    """Owned by one event loop; every method is synchronous."""

    def __init__(self, config: ManagerConfig, epoch: str) -> None:
        make_policy(config.policy, 1)  # an unknown name is refused now, not at the first Hello
        self.config, self.epoch = config, epoch
        self.tiers = HostTiers(config)
        self.attachments = Attachments(config, self.tiers, epoch)
        self._events = EventLog(config.max_events, is_wanted=config.watch)
        self._cleared = ClearedScopes()
        self._states = WorkerStates(config, self.tiers, self._events, self._cleared)
        self.workers = self._states.by_id
        self.lease_bytes = self._states.lease_bytes
        self.limits = SessionLimits(
            max_sequence_tokens=config.max_sequence_tokens,
            max_live_sequences=config.max_live_sequences,
            max_message_bytes=config.max_message_bytes,
            max_adopt_pages=config.max_adopt_pages,
            max_kept_bytes=config.max_kept_bytes,
            grace_ms=config.grace_ms,
        )

    # Sessions.

    def hello(self, hello: Hello, now_ms: int) -> Welcome:
        """Goes on from the state that Hello's generation names; any other of this worker is dropped for a new one.

        What is left of what the worker had is decided in verbs/reconnecting.py.

        Raises InvalidInput, Superseded for an incarnation that was replaced or that started before the present one,
        TooMany beyond `max_workers`.
        """
        check_hello(hello)
        worker = self._states.hello(hello, now_ms)
        self._prune_tiers()
        forget = self._cleared.since(worker.forgotten_clears) if worker.keeps_inventory else None
        worker.told_clears = self._cleared.number
        return Welcome(self.epoch, worker.generation, worker.last_step_id, self.limits, CAPABILITIES, forget)

    def _prune_tiers(self) -> None:
        named = {worker.hello.host_tier_id for worker in self.workers.values()}
        self.tiers.prune(named | self.attachments.tier_ids())

    def disconnect(self, worker_id: WorkerId, incarnation: str, now_ms: int) -> None:
        """Begins the grace period after a broken stream; one of another incarnation is ignored."""
        worker = self.workers.get(worker_id)
        if worker is not None and worker.hello.incarnation == incarnation and worker.connected:
            self._states.leave(worker, now_ms)

    def goodbye(self, worker_id: WorkerId) -> None:
        """Forgets the worker. Raises UnknownWorker."""
        self._states.forget(self._worker(worker_id))
        self._prune_tiers()

    def _worker(self, worker_id: WorkerId) -> Worker:
        worker = self.workers.get(worker_id)
        if worker is None or worker.gone_since_ms is not None:
            raise UnknownWorker("worker_id", f"{worker_id!r} is not connected")
        return worker

    def step(self, worker_id: WorkerId, step: Step, now_ms: int) -> StepReply:
        """Returns the reply, in which items that are wrong are refused; for a repeated step id the reply that was kept.

        Raises UnknownWorker, InvalidInput for a step id or ack that is wrong, UnknownTicket; then nothing changed.
        Any other exception is a fault of ours that may have left a step half applied: the worker's state is dropped,
        so that the step cannot be repeated on it, and the worker adopts what it holds.
        """
        worker = self._worker(worker_id)
        if worker.kept_reply is not None and step.step_id == worker.last_step_id:
            return worker.kept_reply
        if step.step_id <= worker.last_step_id:
            raise InvalidInput("step.step_id", f"{step.step_id} comes after {worker.last_step_id}")
        step_check.check_acks(worker.cache, step.acks)
        if step.forgotten > self._cleared.number:
            raise InvalidInput("step.forgotten", f"{step.forgotten} of {self._cleared.number} Clear calls")
        worker.forgotten_clears = max(worker.forgotten_clears, step.forgotten)
        try:
            reply = stepping.apply_step(worker.cache, step, now_ms)
        except Exception:
            self._states.forget(worker)
            raise
        worker.last_step_id, worker.kept_reply = step.step_id, reply
        return reply

    def worker(self, worker_id: WorkerId) -> DeviceCache:
        """Returns the device cache of a connected worker; for audits, replays and tests."""
        return self._worker(worker_id).cache

    # One verb at a time, for replays and tests. Each raises UnknownWorker and what `step_check` finds: all or nothing.

    def acquire(self, worker_id: WorkerId, item: Acquire) -> Grant | Refusal:
        return stepping.acquire(self._worker(worker_id).cache, item)

    def extend(self, worker_id: WorkerId, item: Extend) -> ExtendGrant | Refusal:
        return stepping.extend(self._worker(worker_id).cache, item)

    def publish(self, worker_id: WorkerId, item: Publish) -> Remap | None:
        return stepping.publish(self._worker(worker_id).cache, item)

    def release(self, worker_id: WorkerId, item: Release) -> None:
        stepping.release(self._worker(worker_id).cache, item)

    # For people, routers and tools.

    def match(self, namespace: Namespace, tokens: bytes, worker_id: WorkerId | None = None) -> tuple[WorkerMatch, ...]:
        """Returns how far each connected worker of the model (or the one named) could reuse the prompt; read-only.

        Raises InvalidInput and TooMany for tokens that are wrong, UnknownWorker.
        """
        step_check.check_tokens(tokens, "tokens", self.config.max_sequence_tokens)
        prompt = PromptMatch(namespace, tokens)
        asked = [(worker.hello, worker.cache) for worker in self._asked(namespace, worker_id)]
        return tuple([WorkerMatch(hello.worker_id, hello.endpoint, prompt.match(cache)) for hello, cache in asked])

    def explaining(
        self, namespace: Namespace, tokens: bytes, worker_id: WorkerId | None, now_ms: int
    ) -> Generator[None, None, tuple[Explanation, ...]]:
        """Yields between slices of the work, and returns where each part of the prompt is on each worker.

        For the operator only: it may say that another salt holds the tokens.

        Raises what `match` raises.
        """
        step_check.check_tokens(tokens, "tokens", self.config.max_sequence_tokens)
        prompt = PromptMatch(namespace, tokens)
        out = []
        for worker in self._asked(namespace, worker_id):
            out.append((yield from explaining.explain(worker, namespace, tokens, prompt, now_ms)))
        return tuple(out)

    def _asked(self, namespace: Namespace, worker_id: WorkerId | None) -> list[Worker]:
        if worker_id:
            return [self._worker(worker_id)]
        models = ("", namespace.model)
        return [w for w in self.workers.values() if w.gone_since_ms is None and w.hello.model in models]

    def pin(self, namespace: Namespace, tokens: bytes, ttl_ms: int, now_ms: int) -> int:
        """Has the cached prefix evicted last for `ttl_ms` (0 unpins). Returns the most tokens that a worker has of it.

        Raises InvalidInput, and TooMany where more than `max_pinned_share` of a worker's pages would be pinned.
        """
        step_check.check_tokens(tokens, "tokens", self.config.max_sequence_tokens)
        if ttl_ms < 0:
            raise InvalidInput("ttl_ms", "must not be negative")
        until_ms = now_ms + ttl_ms if ttl_ms else 0
        caches = [worker.cache for worker in self.workers.values()]
        lacks = next(filter(None, (upkeep.lacks_pin_room(cache, namespace, tokens) for cache in caches)), None)
        if until_ms and lacks is not None:
            raise TooMany("tokens", lacks)
        return max((upkeep.pin_softly(cache, namespace, tokens, until_ms) for cache in caches), default=0)

    def clearing(self, namespace: Namespace | None, unused_only: bool, dry_run: bool = False) -> clearing.Slices:
        """Drops what is cached, on devices and in the host tier; with leases in scope only what none holds.

        To be run to its end; other calls may come between the slices. Raises LeasesInScope at the first one.
        """
        caches = [worker.cache for worker in self.workers.values()]
        is_held = self.attachments.is_in_scope(namespace) or any(upkeep.has_holders(one, namespace) for one in caches)
        if is_held and not unused_only:
            raise LeasesInScope("namespace", "live sequences, open spills or attached engines hold pages in scope")
        if dry_run:
            return (yield from clearing.count(caches, self.tiers.all(), namespace))
        if namespace is None and not unused_only:
            self._events.record(Cleared(None))
        self._note_clear(namespace)
        cleared = yield from clearing.clear(caches, self.tiers.all(), namespace, detach=not unused_only)
        # Again: what was published meanwhile may have been dropped as well.
        self._note_clear(namespace)
        return cleared

    def _note_clear(self, namespace: Namespace | None) -> None:
        """Notes a Clear call, of which workers are told from now on, also those that come later."""
        self._cleared.add(namespace)
        for worker in self.workers.values():
            worker.cache.restored.clear(namespace)

    def unconfirmed(self) -> tuple[WorkerId, ...]:
        """Returns the workers that have not confirmed the last Clear call: their inventories may hold what it
        dropped."""
        last = self._cleared.number
        workers = self.workers.items()
        return tuple(name for name, worker in workers if worker.keeps_inventory and worker.forgotten_clears < last)

    def stats(self) -> ManagerStats:
        workers = tuple(worker_stats(worker) for worker in self.workers.values())
        attached = self.attachments.stats(), self.attachments.stats_by_engine()
        return ManagerStats(self.epoch, self.config.policy, workers, self.tiers.stats(), *attached)

    # Time, and what leaves.

    def tick(self, now_ms: int) -> None:
        """Lets time pass: for grace periods, soft pins, write_back spills, breakers, attached engines."""
        for worker in list(self.workers.values()):
            if self._states.is_over(worker, now_ms):
                self._states.forget(worker)
                self._prune_tiers()
            else:
                upkeep.tick(worker.cache, now_ms)
        self.tiers.tick(now_ms)
        if self.attachments.tick(now_ms):
            self._prune_tiers()

    def take_orders(self, worker_id: WorkerId) -> tuple[Transfer | Forget, ...]:
        """Returns new spill orders for this worker, and what Clear calls dropped since it was told."""
        worker = self.workers.get(worker_id)
        if worker is None or not worker.connected:
            return ()
        spills = spilling.next_orders(worker.cache)
        if worker.told_clears == self._cleared.number or not worker.keeps_inventory:
            return spills
        forget, worker.told_clears = self._cleared.since(worker.told_clears), self._cleared.number
        return (forget, *spills) if forget is not None else spills

    def watch(self, is_watched: bool) -> None:
        """Turns the making of events on or off."""
        self._events.is_wanted = is_watched

    def present_state(self) -> Generator[tuple[Event, ...], None, int]:
        """Yields slices of events that tell what is cached now, for a watcher that comes late."""
        return present_state(self.workers)

    def has_effects(self) -> bool:
        """Returns whether there are events to take, or keys of the host tier to delete or touch."""
        return bool(self._events) or self.tiers.has_work()

    def take_events(self) -> tuple[Event, ...]:
        return self._events.take()

    def take_num_lost_events(self) -> int:
        """Returns how many events were dropped since the last call; they came before those that still wait."""
        return self._events.take_num_lost()

    def host_lost(self, host_tier_id: str) -> None:
        """Drops the index of a store that was flushed or replaced."""
        index = self.tiers.shared.get(host_tier_id)
        if index is None:
            return
        self.attachments.lost(index)
        index.lose()
        for worker in self.workers.values():
            if worker.cache.host is not None and worker.cache.host.index is index:
                renewal.start_refill(worker.cache)
