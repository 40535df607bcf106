"""Seeded lives of a whole deployment: dying workers, restarted managers, lost keys, lost replies."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

from cache_service.core.base.types import FetchPolicy, SpillPolicy
from session.messages import Rates, Refusal
from session.words import GroupSpec, HostTierKind, Namespace
from tests.core.at_once import clear_at_once
from tests.core.driver import FakeWorker
from tests.core.world import FINGERPRINT, World, full, state, window
from tests.simulation.engine import Engine, Request

SHAPES: list[tuple[GroupSpec, ...]] = [
    (full(40),),
    (full(40), window(24, 10)),
    (full(40), state(14)),
    (full(40), window(30, 7), state(16)),
    (full(40), full(36, "second"), window(24, 5)),
    (full(40), window(24, 10), window(16, 2, "near"), state(14), state(12, "other")),
    (full(40), state(20, interval=8)),
]

# Of lives in which engines are cut off from the store.
FETCHES_ALL = {
    "spill": SpillPolicy.WRITE_THROUGH,
    "fetch": FetchPolicy.ALWAYS,
    "host_quota_bytes": 64 * 10_000,
    "breaker_failures": 1,
}


class Outcome(NamedTuple):
    done: int
    cached_tokens: int
    fetched_tokens: int
    num_steps: int
    num_pauses: int  # of one engine's fetches
    num_store_pauses: int  # of all engines'
    tokens_beside: int  # fetched by engines while those of another one were paused
    num_recoveries: int  # engines that fetched after a pause of theirs


class Simulation:
    """`cuts_off`: three engines of one store, which they fetch from whenever they can, are cut off from it often."""

    def __init__(self, seed: int, cuts_off: bool = False) -> None:
        self.rng = rng = Random(seed)
        config: dict[str, Any] = {
            "watch": rng.random() < 0.5,
            "policy": rng.choice(["lru", "slru", "priority", "adaptive"]),
            "spill": rng.choice(list(SpillPolicy)),
            "fetch": rng.choice(list(FetchPolicy)),
            "grace_ms": 50,
            "host_quota_bytes": 64 * rng.choice([8, 60, 10_000]),
            "transfer_pages": rng.choice([1, 3, 64]),
            "breaker_failures": rng.choice([1, 3, 100]),
            "breaker_ms": 30,
            "max_kept_bytes": rng.choice([0, 400, 1 << 20]),
        }
        self.world = World(**(config | (FETCHES_ALL if cuts_off else {})))
        size = rng.choice([1, 1, 3])
        self.shape = tuple(spec._replace(num_pages=spec.num_pages * size) for spec in rng.choice(SHAPES))
        if cuts_off:
            self.shape = (full(30),)
        self.tier = HostTierKind.SHARED if cuts_off else rng.choice(list(HostTierKind))
        self.cuts_off = cuts_off
        self.births = self.num_pauses = self.num_store_pauses = self.tokens_beside = self.num_recoveries = 0
        self.paused: set[str] = set()  # engines whose fetches are paused by failures of their own
        self.recovering: set[str] = set()  # were, and have fetched nothing since
        self.is_store_paused = False
        self.calm = False
        self.trunks = [self._tokens(rng.randrange(1, 30)) for _ in range(5)]
        self.engines = [self._engine(f"w{i}") for i in range(3 if cuts_off else rng.choice([1, 2, 3]))]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3) for _ in range(count)]

    def _engine(self, name: str) -> Engine:
        self.births += 1
        tier_id = "redis" if self.tier == HostTierKind.SHARED else ""
        worker = FakeWorker(self.world, self.shape, 4, name, f"birth {self.births}", self.tier, tier_id)
        worker.loses_reply = lambda: not self.calm and self.rng.random() < 0.02
        return Engine(worker, self.rng, budget=self.rng.choice([3, 4, 8, 13]))

    def run(self, num_iterations: int) -> Outcome:
        for _ in range(num_iterations):
            self._arrivals()
            self._faults()
            self._iterate()
        self.calm = True
        for engine in self.engines:
            engine.is_cut_off = False
        for _ in range(4_000):
            if all(engine.idle() for engine in self.engines):
                break
            self._iterate()
        self._over()
        return Outcome(
            sum(engine.done for engine in self.engines),
            sum(engine.cached for engine in self.engines),
            sum(engine.fetched for engine in self.engines),
            sum(engine.clock for engine in self.engines),
            self.num_pauses,
            self.num_store_pauses,
            self.tokens_beside,
            self.num_recoveries,
        )

    def _iterate(self) -> None:
        for engine in self.engines:
            fetched = engine.fetched
            engine.iterate()
            self._count_pauses(engine, engine.fetched - fetched)
        self.world.tick(self.rng.randrange(1, 8))

    def _count_pauses(self, engine: Engine, fetched: int) -> None:
        """Counts pauses of fetches, and what went on beside them; `fetched`: tokens of the engine's last iteration."""
        name, stats = engine.worker.id, self.world.manager.stats()
        if fetched and self.paused - {name}:
            self.tokens_beside += fetched
        if fetched and name in self.recovering - self.paused:
            self.recovering.discard(name)
            self.num_recoveries += 1
        paused = {worker.worker_id for worker in stats.workers if worker.fetches_paused}
        self.num_pauses += len(paused - self.paused)
        self.num_store_pauses += stats.host_tier.breaker_open > self.is_store_paused
        self.paused, self.is_store_paused = set(paused), stats.host_tier.breaker_open
        self.recovering |= paused

    def _arrivals(self) -> None:
        rng = self.rng
        while rng.random() < 0.35:
            trunk = rng.choice(self.trunks)
            cut = len(trunk) if rng.random() < 0.7 else rng.randrange(1, len(trunk) + 1)
            prompt = trunk[:cut] + self._tokens(rng.randrange(0, 12))
            output = self._tokens(rng.randrange(1, 16))
            namespace = Namespace("model", "", rng.choice(["", "", "", "tenant"]))
            aborts_at = rng.randrange(len(output)) if rng.random() < 0.1 else -1
            request = Request(namespace, prompt, output, 0, rng.randrange(2), aborts_at, bypass=rng.random() < 0.1)
            rng.choice(self.engines).queue.append(request)
            if rng.random() < 0.3:
                self.trunks[rng.randrange(len(self.trunks))] = (prompt + output)[:70]

    # -- faults ------------------------------------------------------------------------------------------------

    def _faults(self) -> None:
        rng, engine = self.rng, self.rng.choice(self.engines)
        dice = rng.random()
        for one in self.engines:
            one.is_cut_off = one.is_cut_off and dice > 0.05
        if dice < 0.01:
            self._worker_dies(engine)
        elif dice < 0.02:
            self._manager_restarts()
        elif dice < 0.03:
            self._store_flushed()
        elif dice < 0.05:
            self._stream_breaks(engine)
        elif dice < 0.06:
            self._long_partition(engine)
        elif dice < 0.08:
            for store in self.world.stores.values():
                if store:
                    del store[rng.choice(list(store))]
        elif dice < 0.09:
            clear_at_once(self.world.manager, None, True)
            self.world.settle()
        elif dice < 0.11:
            engine.worker.rates = Rates(rng.choice([0.0, 1.0, 1e6]), rng.choice([0.0, 1.0, 1e9]))
        elif dice < (0.19 if self.cuts_off else 0.14):
            engine.is_cut_off = True
        elif dice < (0.22 if self.cuts_off else 0.15):
            for one in self.engines:
                one.is_cut_off = True

    def _worker_dies(self, engine: Engine) -> None:
        """Its clients try again; elsewhere, or here when it is back."""
        if self.rng.random() < 0.5:
            engine.worker.disconnect()
            self.world.tick(self.rng.choice([5, 100]))
        lost = [r.request for r in engine.running] + list(engine.queue)
        engine.queue.clear()
        engine.running.clear()
        engine.ending.clear()
        engine.blocked = False
        self.births += 1
        engine.worker.restart(f"birth {self.births}")
        for request in lost:
            request.said = request.sequence = 0
            self.rng.choice(self.engines).queue.append(request)

    def _manager_restarts(self) -> None:
        self.world.new_manager()
        for engine in self.engines:
            engine.worker.connected = False
        for engine in self.engines:
            self._hand_over(engine)
        if self.tier == HostTierKind.SHARED:
            keys = list(self.world.stores.get("redis", {}))
            self.world.manager.tiers.add_scanned("redis", FINGERPRINT, keys)
            self.world.settle()

    def _long_partition(self, engine: Engine) -> None:
        engine.worker.disconnect()
        self.world.tick(200)
        self._hand_over(engine)

    def _hand_over(self, engine: Engine) -> None:
        """Hello to a manager without state of this worker: adopt what computed something, queue the rest again."""
        worker = engine.worker
        worker.spills.clear()
        worker.orphans.clear()
        for r, _ in engine.ending:
            worker.live.pop(r.live.id, None)
        engine.ending.clear()
        for r in list(engine.running):
            if r.live.fetch is not None or r.live.computed == r.live.grant.usable_tokens:
                worker.live.pop(r.live.id, None)
                engine.running.remove(r)
                engine.queue.appendleft(r.request)
        worker.hello()
        assert not worker.goes_on
        size = self.rng.randrange(1, 5)
        running = list(engine.running)
        for first in range(0, len(running), size):
            batch = running[first : first + size]
            for r, answer in zip(batch, worker.adopt_all([r.live for r in batch]), strict=True):
                if isinstance(answer, Refusal):
                    engine.running.remove(r)
                    engine.queue.appendleft(r.request)

    def _stream_breaks(self, engine: Engine) -> None:
        engine.worker.disconnect()
        self.world.tick(self.rng.randrange(40))
        engine.worker.spills.clear()
        engine.worker.hello()
        assert engine.worker.goes_on

    def _store_flushed(self) -> None:
        for store in self.world.stores.values():
            store.clear()
        if self.tier == HostTierKind.SHARED and self.rng.random() < 0.5:
            self.world.manager.host_lost("redis")
            self.world.settle()

    # -- the end -----------------------------------------------------------------------------------------------

    def _over(self) -> None:
        """Nothing waits, nothing is held, nothing leaked."""
        for engine in self.engines:
            assert engine.idle(), (
                f"{len(engine.queue)} wait and {len(engine.running)} run for ever on {engine.worker.id}"
            )
            engine.worker.spill_all()
            for ticket in list(engine.worker.orphans):
                engine.worker.ack_orphan(ticket)
            engine.worker.spill_all()
        for stats in self.world.manager.stats().workers:
            assert stats.num_leases == stats.num_tickets == 0
            assert all(g.num_free + g.num_evictable == g.num_pages for g in stats.groups)


def simulate(seed: int, num_iterations: int = 120, cuts_off: bool = False) -> Outcome:
    """One life. A failure names its seed."""
    try:
        return Simulation(seed, cuts_off).run(num_iterations)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}") from error
