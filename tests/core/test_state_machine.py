"""A Hypothesis state machine over the manager, judged by the oracle, the audit and the shadow contents of every page.

Knows no acceptance case: alphabet 2, pages of 2 tokens, pools of about 8, every verb in any order.
STEMCACHE_HYPOTHESIS=thorough runs longer.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from cache_service.core.errors import LeasesInScope
from cache_service.core.types import (
    Ack,
    Acquire,
    Extend,
    FetchPolicy,
    GroupKind,
    GroupSpec,
    HostTierKind,
    Namespace,
    Refusal,
    Release,
    SequenceId,
    SpillPolicy,
    TicketId,
)
from tests.core.driver import FakeWorker
from tests.core.judge import judge_grant, judge_refusal
from tests.core.oracle import Oracle
from tests.core.world import ABORTED, DONE, FAILED, FINISHED, MISSING, PREEMPTED, Live, World, full, pack, state, window

GROUPS: list[tuple[GroupSpec, ...]] = [
    (full(8),),
    (full(8), window(8, 4)),
    (full(8), window(6, 3)),
    (full(9), state(6)),
    (full(8), window(7, 4), state(5)),
    (full(8), full(7, "second")),
    (full(9), window(8, 6, "far"), window(6, 2, "near"), state(7)),
    (full(8), state(5), state(4, "other")),
    (window(8, 4),),
    (window(8, 3), state(6)),
    (state(6),),
]
SALTS = st.sampled_from(["", "", "", "salt"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=13)
INDEX = st.integers(0, 7)


class Machine(RuleBasedStateMachine):
    """One or two workers; a second one exists only to share the host tier."""

    @initialize(
        groups=st.sampled_from(GROUPS),
        tier=st.sampled_from([HostTierKind.NONE, HostTierKind.PRIVATE, HostTierKind.SHARED, HostTierKind.SHARED]),
        spill=st.sampled_from([SpillPolicy.WRITE_THROUGH, SpillPolicy.WRITE_THROUGH, *SpillPolicy]),
        fetch=st.sampled_from(FetchPolicy),
        policy=st.sampled_from(["lru", "lru", "slru", "priority"]),
        small=st.booleans(),
    )
    def begin(self, groups: Any, tier: Any, spill: Any, fetch: Any, policy: str, small: bool) -> None:
        self.world = World(
            watch=True,
            spill=spill,
            fetch=fetch,
            policy=policy,
            grace_ms=100,
            host_quota_bytes=64 * (5 if small else 1000),
            transfer_pages=2 if small else 64,
            breaker_failures=3,
            breaker_ms=50,
        )
        self.tier, self.policy = tier, policy
        self.workers = [
            FakeWorker(self.world, groups, 2, name, host_tier=tier, host_tier_id="redis" if tier == 3 else "")
            for name in (["w0", "w1"] if tier == HostTierKind.SHARED else ["w0"])
        ]
        self.oracles = {worker.id: Oracle(worker) for worker in self.workers}
        self.old_tickets: list[tuple[FakeWorker, int]] = []
        self.births = 0
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

    # -- requests ----------------------------------------------------------------------------------------------

    @rule(
        at=INDEX,
        tokens=TOKENS,
        salt=SALTS,
        chunk=st.integers(0, 6),
        reserve=st.sampled_from([0, 0, 0, 1, 2]),
        base=INDEX,
        keep=st.integers(0, 12),
    )
    def acquire(self, at: int, tokens: list[int], salt: str, chunk: int, reserve: int, base: int, keep: int) -> None:
        tokens, priority = self.prompt(tokens, base, keep), at % 2
        worker = self.worker(at)
        oracle, namespace = self.oracles[worker.id], Namespace("model", "", salt)
        forecast = oracle.forecast(namespace, tokens, chunk, reserve)
        free, leaves = [oracle.num_free(g) for g in range(len(worker.groups))], oracle.leaves()
        blurred = oracle.blurred()
        answer = worker.submit(tokens, namespace, chunk=chunk, reserve=reserve, priority=priority)
        if isinstance(answer, Refusal):
            judge_refusal(worker, answer, forecast, blurred)
        else:
            judge_grant(oracle, answer, forecast, [] if blurred else free)
            if self.policy == "lru" and self.tier == HostTierKind.NONE:
                oracle.judge_evictions(leaves)
        self.checked()

    @rule(at=INDEX, size=st.integers(1, 6), ask=st.booleans())
    def launch(self, at: int, size: int, ask: bool) -> None:
        found = self.live(at)
        if found is None or found[1].computed == len(found[1].tokens):
            return
        worker, live = found
        end = min(live.computed + size, len(live.tokens))
        if self.room(worker, live, end, ask):
            worker.launch(live, end - live.computed)
        self.checked()

    def room(self, worker: FakeWorker, live: Live, end: int, ask: bool) -> bool:
        """Pages up to `end`, asked for where they are missing; the oracle knows whether there are any."""
        pages = -(-end // 2)
        tables = [g for g, spec in enumerate(worker.groups) if spec.kind != GroupKind.STATE]
        need = {g: max(0, pages - len(live.table(g))) for g in tables}
        if not ask and end <= live.room and not any(need.values()):
            return True
        oracle = self.oracles[worker.id]
        fits = all(n <= oracle.num_free(g) + len(oracle.evictable(g)) for g, n in need.items())
        blurred = oracle.blurred()
        granted = worker.extend(live, end)
        assert blurred or granted == fits or (worker.spills and not granted), "an extend against the counts"
        return granted

    @rule(
        at=INDEX,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        drafts=st.integers(0, 2),
        run=st.booleans(),
    )
    def decode(self, at: int, tokens: list[int], drafts: int, run: bool) -> None:
        """Several tokens accepted at once; the last of them has no KV unless it is run."""
        found = self.live(at)
        if found is None or found[1].computed < len(found[1].tokens) - 1 or len(found[1].tokens) > 18:
            return
        worker, live = found
        end = len(live.tokens) + len(tokens)
        if self.room(worker, live, end + drafts, True):
            live.append(tokens)
            stop = end if run else end - 1
            if stop > live.computed:
                worker.launch(live, stop - live.computed)
        self.checked()

    @rule(at=INDEX, lag=st.integers(0, 3), hide=st.integers(0, 2))
    def publish(self, at: int, lag: int, hide: int) -> None:
        found = self.live(at)
        if found is None:
            return
        worker, live = found
        before, computed = live.reported, max(live.reported, live.computed - lag)
        worker.publish(live, computed, max(computed, len(live.tokens) - hide))
        oracle = self.oracles[worker.id]
        for group, boundary in live.leave:
            if before < boundary <= live.reported:
                assert oracle.has(group, live.namespace, live.tokens, boundary), "a snapshot got lost"
        self.checked()

    @rule(at=INDEX, reason=st.sampled_from([FINISHED, ABORTED, PREEMPTED]))
    def release(self, at: int, reason: Any) -> None:
        lives = [(w, live) for w in self.workers for live in w.live.values()]
        if not lives:
            return
        worker, live = lives[at % len(lives)]
        if reason == FINISHED and live.fetch is None and live.computed > live.reported:
            worker.publish(live)  # finished: every launch was reported
        worker.release(live, reason)
        self.oracles[worker.id].used(live)
        self.checked()

    @rule(at=INDEX, tokens=st.lists(TOKENS, max_size=3), end=st.booleans(), lag=st.integers(0, 1))
    def whole_step(self, at: int, tokens: list[list[int]], end: bool, lag: int) -> None:
        """Everything that an iteration may say, in one message; it is then repeated and must be answered alike."""
        worker = self.worker(at)
        lives = [live for live in worker.live.values() if live.fetch is None]
        publishes = [worker.publish_of(live, max(live.reported, live.computed - lag)) for live in lives]
        gone = lives[:1] if end and not lag else []
        acquires = [
            Acquire(SequenceId(self.world.next_sequence + 1 + i), Namespace("model"), pack(prompt), 0, 3)
            for i, prompt in enumerate(tokens)
        ]
        self.world.next_sequence += len(acquires)
        fields: dict[str, Any] = {
            "publishes": publishes,
            "releases": [Release(SequenceId(live.id), FINISHED) for live in gone],
            "extends": [Extend(SequenceId(live.id), live.computed + 2) for live in lives[1:] if live.computed < 16],
            "acquires": acquires,
        }
        reply = worker.step(**fields)
        for live, publish in zip(lives, publishes, strict=True):
            worker.published(live, publish)
        for live in gone:
            worker.forget(live)
            self.oracles[worker.id].used(live)
        for acquire in acquires:
            worker.taken(acquire, reply)
        before = self.world.snapshot()
        assert worker.last_step is not None
        assert self.world.manager.step(worker.id, worker.last_step, self.world.now_ms) == reply
        assert self.world.snapshot() == before
        self.checked()

    @rule(
        tokens=TOKENS,
        salt=SALTS,
        chunk=st.integers(0, 4),
        at=INDEX,
        base=INDEX,
        keep=st.integers(0, 12),
        flush=st.booleans(),
    )
    def serve(self, tokens: list[int], salt: str, chunk: int, at: int, base: int, keep: int, flush: bool) -> None:
        """A whole request, so that there is something to hit."""
        worker = self.worker(at)
        prompt = self.prompt(tokens, base, keep)
        live = worker.submit(prompt, Namespace("model", "", salt), chunk=chunk)
        if isinstance(live, Refusal):
            return
        if live.fetch is not None and flush:
            return
        worker.fetch_all(live)
        if live.ended:
            return
        while live.computed < len(live.tokens):
            end = min(live.computed + (chunk or 13), len(live.tokens))
            if not self.room(worker, live, end, True):
                return
            worker.launch(live, end - live.computed)
            worker.publish(live)
        worker.release(live)
        self.oracles[worker.id].used(live)
        if flush:
            worker.spill_all()
        self.checked()

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
        status=st.sampled_from([FAILED, MISSING]),
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
        kind=st.sampled_from(["stream", "stream", "death", "partition", "manager", "flush"]),
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
        elif kind == "manager":
            self.manager_restart()
        else:
            self.flush_host(at)

    # -- transfers ---------------------------------------------------------------------------------------------

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
        assert live.fetch is not None
        ticket, num_pages = live.fetch.ticket, live.fetch.num_pages
        limit = max(0, num_pages - short)
        worker.do_fetch(live, limit, status if limit < num_pages else None)
        self.old_tickets.append((worker, ticket))
        self.checked()

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

    # -- people and time ---------------------------------------------------------------------------------------

    def tick(self, ms: int) -> None:
        self.world.tick(ms)
        self.checked()

    def pin(self, tokens: list[int], salt: str, ttl: int) -> None:
        namespace = Namespace("model", "", salt)
        pinned = self.world.manager.pin(namespace, pack(tokens), ttl, self.world.now_ms)
        assert pinned <= len(tokens)
        self.world.settle()
        self.policy = "pinned"
        self.checked()

    def clear(self, salt: str | None, unused: bool) -> None:
        namespace = None if salt is None else Namespace("model", "", salt)
        before = self.world.snapshot()
        try:
            self.world.manager.clear(namespace, unused, self.world.now_ms)
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
        self.world.manager.explain(namespace, pack(tokens))
        assert self.world.snapshot() == before

    # -- deaths ------------------------------------------------------------------------------------------------

    def broken_stream(self, at: int) -> None:
        """The mover is drained before Hello: fetches may have been carried out, their acks are still to come."""
        worker = self.worker(at)
        worker.disconnect()
        self.world.tick(10)
        self.old_tickets += [(worker, order.ticket) for order, _ in worker.spills]
        worker.spills.clear()
        welcome = worker.hello()
        assert set(welcome.known_sequences) == set(worker.live)
        assert welcome.last_step_id == worker.step_id
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
        assert welcome.known_sequences == ()
        worker.step_id = welcome.last_step_id
        worker.live = {}
        for live in lives:
            worker.live[live.id] = live
            worker.adopt(live)

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


THOROUGH = os.environ.get("STEMCACHE_HYPOTHESIS") == "thorough"
TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=5_000 if THOROUGH else 500,
    stateful_step_count=60 if THOROUGH else 35,
    deadline=None,
    derandomize=not THOROUGH,
    suppress_health_check=list(HealthCheck),
)
