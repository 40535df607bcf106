"""What the manager's state machine lives in: pools, workers with an oracle each, transfers, people and faults."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from cache_service.core.base.errors import LeasesInScope
from cache_service.core.base.types import FetchPolicy, SpillPolicy
from cache_service.core.host.breaker import Breaker
from session.errors import TooMany
from session.messages import Ack
from session.words import TOKEN_BYTES, GroupKind, GroupSpec, HostTierKind, MissReason, Namespace, TicketId, WorkerId
from tests.core.at_once import clear_at_once, explain_at_once
from tests.core.driver import FakeWorker
from tests.core.oracle import Oracle
from tests.core.world import ABORTED, CORRUPT, DONE, FAILED, MISSING, Live, World, full, pack, state, window

GROUPS: list[tuple[GroupSpec, ...]] = [
    (full(8),),
    (full(8), window(8, 4)),
    (full(8), window(6, 3)),
    (full(9), state(6)),
    (full(8), window(7, 4), state(5)),
    (full(8), full(7, "second")),
    (full(9), window(8, 6, "far"), window(6, 2, "near"), state(7)),
    (full(8), state(5), state(4, "other")),
    (full(9), state(9, interval=4)),
    (full(9), window(8, 4), state(8, interval=2), state(6, "other", 6)),
    (window(8, 4),),
    (window(8, 3), state(6)),
    (state(6),),
]
SALTS = st.sampled_from(["", "", "", "salt"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=13)
INDEX = st.integers(0, 7)
PAUSED_OR_LIMITED = (MissReason.BREAKER_OPEN, MissReason.NO_SNAPSHOT, MissReason.WINDOW_GONE)
BOUNDARIES = st.lists(st.integers(1, 7).map(lambda page: 2 * page), max_size=2)


class Troubled(RuleBasedStateMachine):
    """One or two workers; a second one exists only to share the host tier."""

    @initialize(
        groups=st.sampled_from(GROUPS),
        tier=st.sampled_from([HostTierKind.NONE, HostTierKind.PRIVATE, HostTierKind.SHARED, HostTierKind.SHARED]),
        spill=st.sampled_from([SpillPolicy.WRITE_THROUGH, SpillPolicy.WRITE_THROUGH, *SpillPolicy]),
        fetch=st.sampled_from(FetchPolicy),
        policy=st.sampled_from(["lru", "lru", "slru", "priority", "adaptive", "adaptive"]),
        small=st.booleans(),
        breaker_failures=st.sampled_from([1, 3]),
    )
    def begin(
        self, groups: Any, tier: Any, spill: Any, fetch: Any, policy: str, small: bool, breaker_failures: int
    ) -> None:
        self.world = World(
            watch=True,
            spill=spill,
            fetch=fetch,
            policy=policy,
            grace_ms=100,
            host_quota_bytes=64 * (5 if small else 1000),
            transfer_pages=2 if small else 64,
            breaker_failures=breaker_failures,
            breaker_ms=50,
            max_kept_bytes=TOKEN_BYTES * (20 if small else 10_000),
        )
        self.tier, self.policy = tier, policy
        self.workers = [
            FakeWorker(self.world, groups, 2, name, host_tier=tier, host_tier_id="redis" if tier == 3 else "")
            for name in (["w0", "w1"] if tier == HostTierKind.SHARED else ["w0"])
        ]
        self.oracles = {worker.id: Oracle(worker) for worker in self.workers}
        self.old_tickets: list[tuple[FakeWorker, int]] = []
        self.births = 0
        self.remembers_all = not small
        self.waiting: dict[tuple[str, int], tuple[Namespace, list[int]]] = {}
        self.prompts: list[list[int]] = []

    def worker(self, index: int) -> FakeWorker:
        return self.workers[index % len(self.workers)]

    def live(self, index: int) -> tuple[FakeWorker, Live] | None:
        """Some sequence that may run."""
        lives = [(w, live) for w in self.workers for live in w.live.values() if live.fetch is None]
        return lives[index % len(lives)] if lives else None

    def checked(self) -> None:
        for oracle in self.oracles.values():
            oracle.check()

    def prompt(self, tokens: list[int], base: int, keep: int) -> list[int]:
        """Something new, or an earlier prompt with another end."""
        if self.prompts and keep:
            tokens = (self.prompts[base % len(self.prompts)][:keep] + tokens)[:14]
        self.prompts = [*self.prompts[-7:], tokens]
        return tokens

    @rule(
        kind=st.sampled_from(["spill", "spill", "fetch", "fetch", "orphan", "again"]),
        at=INDEX,
        short=st.integers(0, 3),
        status=st.sampled_from([FAILED, MISSING, CORRUPT]),
    )
    def transfer(self, kind: str, at: int, short: int, status: Any) -> None:
        if kind == "spill":
            self.spill(at, short, status)
        elif kind == "fetch":
            self.fetch(at, short, status)
        elif kind == "orphan":
            self.orphan(at)
        else:
            self.duplicate_ack(at)

    @rule(
        kind=st.sampled_from(["tick", "match", "match", "pin", "clear"]),
        ms=st.integers(0, 60),
        tokens=TOKENS,
        salt=SALTS,
        base=INDEX,
        keep=st.integers(0, 12),
        ttl=st.sampled_from([0, 20, 500]),
        flag=st.booleans(),
    )
    def people(
        self, kind: str, ms: int, tokens: list[int], salt: str, base: int, keep: int, ttl: int, flag: bool
    ) -> None:
        if self.prompts and keep:
            tokens = self.prompts[base % len(self.prompts)][:keep] + tokens
        if kind == "match":
            self.match(tokens, salt)
        elif kind == "pin":
            self.pin(tokens, salt, ttl)
        elif kind == "clear":
            self.clear(None if ttl else salt, flag)
        self.tick(ms)

    @rule(
        kind=st.sampled_from(
            ["stream", "stream", "death", "partition", "anew", "manager", "flush", "outage", "outage"]
        ),
        at=INDEX,
        flag=st.booleans(),
    )
    def fault(self, kind: str, at: int, flag: bool) -> None:
        if kind == "stream":
            self.broken_stream(at)
        elif kind == "death":
            self.worker_death(at, flag)
        elif kind == "partition":
            self.long_partition(at)
        elif kind == "anew":
            self.begin_anew(at)
        elif kind == "manager":
            self.manager_restart()
        elif kind == "outage":
            self.outage(at, flag)
        else:
            self.flush_host(at)

    def spill(self, at: int, short: int, status: Any) -> None:
        worker = self.worker(at)
        if not worker.spills:
            return
        index = at % len(worker.spills)
        order = worker.spills[index][0]
        done = max(0, order.num_pages - short)
        worker.do_spill(index, done, DONE if done == order.num_pages else status)
        self.old_tickets.append((worker, order.ticket))
        self.checked()

    def fetch(self, at: int, short: int, status: Any) -> None:
        waiting = [(w, live) for w in self.workers for live in w.live.values() if live.fetch is not None]
        if not waiting:
            return
        worker, live = waiting[at % len(waiting)]
        fetch = live.fetches[at % len(live.fetches)]
        ticket, num_pages = fetch.ticket, fetch.num_pages
        limit = max(0, num_pages - short)
        if status == FAILED and limit < num_pages:
            self.fail_alone(worker, live, limit, at)
        else:
            worker.do_fetch(live, limit, status if limit < num_pages else None, at)
            store, own = self.breakers()
            assert not (store.failures or own[WorkerId(worker.id)].failures), "an answer of the store closes both"
        self.old_tickets.append((worker, ticket))
        self.checked()

    def breakers(self) -> tuple[Breaker, dict[WorkerId | int, Breaker]]:
        """The store's, and those of its readers."""
        (index,) = self.world.manager.tiers.all()
        return index.breaker, index.readers.breakers

    def fail_alone(self, worker: FakeWorker, live: Live, num_done: int, at: int = 0) -> None:
        """A worker's failures pause that worker alone; all are paused when most of them have failed."""
        (store, own), name = self.breakers(), WorkerId(worker.id)
        others, was_open = {other: repr(one) for other, one in own.items() if other != name}, store.is_open
        num_failures = own[name].failures
        worker.do_fetch(live, num_done, FAILED, at)
        assert own[name].failures == num_failures + 1
        assert others == {other: repr(one) for other, one in own.items() if other != name}
        has_most = 2 * sum(one.is_open for one in own.values()) > len(own)
        assert store.is_open == (was_open or (own[name].is_open and has_most))

    def outage(self, at: int, is_everywhere: bool) -> None:
        """The way to the store breaks for one worker, or for all: every open fetch fails. Nothing is fetched until the
        pause is over, by nobody else's doing; then one ticket tries."""
        for worker in self.workers if is_everywhere else [self.worker(at)]:
            for live in list(worker.live.values()):
                while live.fetches:
                    self.old_tickets.append((worker, live.fetches[0].ticket))
                    self.fail_alone(worker, live, 0)
            self.checked()

    def judge_pause(self, worker: FakeWorker, live: Live, before: tuple[bool, bool, int]) -> None:
        """`before` the acquire: whether the worker's fetches were paused, whether it was to try, fetches under way."""
        is_paused, is_trying, num_fetching = before
        if is_paused or (is_trying and num_fetching):
            assert live.fetch is None, "a fetch while fetches are paused"
            why = live.grant.match.miss_reason
            assert not live.grant.match.host_tokens or why in PAUSED_OR_LIMITED, "a grant does not say why it computes"
        elif is_trying:
            assert len(live.fetches) <= 1, "one ticket tries"

    def fetch_state(self, worker: FakeWorker) -> tuple[bool, bool, int]:
        cache = self.world.manager.worker(WorkerId(worker.id))
        if cache.host is None:
            return False, False, 0
        is_paused = cache.host.index.readers.is_paused(cache.worker_id)
        return is_paused, cache.fetch_breaker.is_trying, cache.transfers.num_fetching

    def orphan(self, at: int) -> None:
        orphans = [(w, ticket) for w in self.workers for ticket in w.orphans]
        if orphans:
            worker, ticket = orphans[at % len(orphans)]
            worker.ack_orphan(ticket)
            self.old_tickets.append((worker, ticket))
        self.checked()

    def duplicate_ack(self, at: int) -> None:
        if not self.old_tickets:
            return
        worker, ticket = self.old_tickets[at % len(self.old_tickets)]
        before = self.world.snapshot()
        worker.step(acks=[Ack(TicketId(ticket), 1, DONE)])
        assert self.world.snapshot() == before, "a ticket was closed twice"

    def flush_host(self, at: int) -> None:
        """Keys vanish: one, or all of them."""
        for store in self.world.stores.values():
            if at and store:
                store.pop(sorted(store)[at % len(store)])
            else:
                store.clear()

    def tick(self, ms: int) -> None:
        self.world.tick(ms)
        self.checked()

    def pin(self, tokens: list[int], salt: str, ttl: int) -> None:
        namespace = Namespace("model", "", salt)
        before = self.world.snapshot()
        try:
            pinned = self.world.manager.pin(namespace, pack(tokens), ttl, self.world.now_ms)
            assert pinned <= len(tokens)
        except TooMany:
            assert ttl and self.world.snapshot() == before
            pinned = max(stats.pinned_tokens for stats in self.world.manager.stats().workers)
            most = self.world.config.max_pinned_share * min(spec.num_pages for spec in self.workers[0].groups)
            assert pinned + len(tokens) > most * 2, "there was room for the pin"
        self.world.settle()
        self.policy = "pinned"
        self.checked()

    def clear(self, salt: str | None, unused: bool) -> None:
        namespace = None if salt is None else Namespace("model", "", salt)
        before = self.world.snapshot()
        try:
            clear_at_once(self.world.manager, namespace, unused)
        except LeasesInScope:
            assert not unused and any(w.live or w.spills or w.orphans for w in self.workers)
            assert self.world.snapshot() == before
        self.world.settle()
        self.checked()

    def match(self, tokens: list[int], salt: str) -> None:
        before = self.world.snapshot()
        namespace = Namespace("model", "", salt)
        for found in self.world.manager.match(namespace, pack(tokens)):
            oracle = self.oracles[found.worker_id]
            assert found.match.usable_tokens == oracle.usable(namespace, tokens)
            if any(spec.kind == GroupKind.FULL for spec in oracle.specs):
                assert found.match.matched_tokens == oracle.matched(namespace, tokens)
        explain_at_once(self.world.manager, namespace, pack(tokens))
        assert self.world.snapshot() == before

    def broken_stream(self, at: int) -> None:
        """The mover is drained before Hello: fetches may have been carried out, their acks are still to come."""
        worker = self.worker(at)
        worker.disconnect()
        self.world.tick(10)
        self.old_tickets += [(worker, order.ticket) for order, _ in worker.spills]
        worker.spills.clear()
        welcome = worker.hello()
        assert worker.goes_on and welcome.last_step_id == worker.applied
        self.checked()

    def worker_death(self, at: int, grace: bool) -> None:
        worker = self.worker(at)
        if grace:
            worker.disconnect()
            self.world.tick(200)
        self.births += 1
        self.oracles[worker.id].forget()
        self.old_tickets = [(w, t) for w, t in self.old_tickets if w is not worker]
        worker.restart(f"birth {self.births}")
        self.checked()

    def long_partition(self, at: int) -> None:
        """The worker lives on, but its grace is over: it hands its sequences to a manager that forgot them."""
        worker = self.worker(at)
        worker.disconnect()
        self.world.tick(200)
        self.come_back(worker)
        self.checked()

    def begin_anew(self, at: int) -> None:
        """The worker names no state: the manager drops the one that it had, with its leases and tickets."""
        worker = self.worker(at)
        worker.disconnect()
        worker.generation = 0
        self.come_back(worker)
        self.checked()

    def manager_restart(self) -> None:
        self.world.new_manager()
        self.old_tickets = []
        for worker in self.workers:
            worker.connected = False
        for worker in self.workers:
            self.come_back(worker)
        self.checked()

    def come_back(self, worker: FakeWorker) -> None:
        """Tickets are void; what computed nothing queues again; the rest is adopted."""
        self.oracles[worker.id].forget()
        self.old_tickets = [(w, t) for w, t in self.old_tickets if w is not worker]
        worker.spills.clear()
        worker.orphans.clear()
        for live in list(worker.live.values()):
            if live.fetch is not None or live.computed == live.grant.usable_tokens:
                worker.live.pop(live.id)
        lives = list(worker.live.values())
        welcome = worker.hello()
        assert not worker.goes_on and welcome.last_step_id == 0
        worker.live = {live.id: live for live in lives}
        oracle = self.oracles[worker.id]
        for first in range(0, len(lives), 2):  # a Step has room for a few
            worker.adopt_all(lives[first : first + 2])
        oracle.check()

    def teardown(self) -> None:
        """When all is over nothing is held."""
        if not hasattr(self, "workers"):
            return
        for worker in self.workers:
            for live in list(worker.live.values()):
                worker.release(live, ABORTED)
            for ticket in list(worker.orphans):
                worker.ack_orphan(ticket)
            while worker.spills:
                worker.do_spill(0, 0, FAILED)
        self.checked()
        for stats in self.world.manager.stats().workers:
            assert stats.num_leases == stats.num_tickets == 0
            assert all(g.num_free + g.num_evictable == g.num_pages for g in stats.groups)
