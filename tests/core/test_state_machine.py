"""A Hypothesis state machine over the manager, judged by the oracle, the audit and the shadow contents of every page.

STEMCACHE_HYPOTHESIS=thorough runs longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from cache_service.compiled import IS_COMPILED
from session.messages import Acquire, Adopt, BadItem, Extend, Publish, Refusal, Release
from session.words import GroupKind, HostTierKind, Namespace, RefusalReason, SequenceId
from tests.core.driver import FakeWorker
from tests.core.judge import judge_grant, judge_refusal
from tests.core.troubled import BOUNDARIES, INDEX, SALTS, TOKENS, Troubled
from tests.core.world import ABORTED, FINISHED, PREEMPTED, Live, pack
from tests.examples import THOROUGH, examples


class Machine(Troubled):
    """Requests of every shape, amid the rest."""

    @rule(
        at=INDEX,
        tokens=TOKENS,
        salt=SALTS,
        chunk=st.integers(0, 6),
        reserve=st.sampled_from([0, 0, 0, 1, 2]),
        base=INDEX,
        keep=st.integers(0, 12),
        bypass=st.sampled_from([False, False, False, True]),
        leave_at=BOUNDARIES,
    )
    def acquire(
        self,
        at: int,
        tokens: list[int],
        salt: str,
        chunk: int,
        reserve: int,
        base: int,
        keep: int,
        bypass: bool,
        leave_at: list[int],
    ) -> None:
        tokens, priority = self.prompt(tokens, base, keep), at % 2
        worker = self.worker(at)
        oracle, namespace = self.oracles[worker.id], Namespace("model", "", salt)
        forecast = oracle.forecast(namespace, tokens, chunk, reserve, bypass)
        free, leaves = [oracle.num_free(g) for g in range(len(worker.groups))], oracle.leaves()
        blurred, fetching = oracle.blurred(), self.fetch_state(worker)
        answer = worker.submit(
            tokens, namespace, chunk=chunk, reserve=reserve, priority=priority, bypass=bypass, leave_at=leave_at
        )
        if isinstance(answer, Refusal) and answer.reason is RefusalReason.NO_ROOM:
            self.waiting[worker.id, answer.sequence_id] = namespace, tokens
        if isinstance(answer, Refusal):
            judge_refusal(worker, answer, forecast, blurred)
        else:
            judge_grant(oracle, answer, forecast, [] if blurred else free)
            self.judge_pause(worker, answer, fetching)
            if self.policy == "lru" and self.tier == HostTierKind.NONE:
                oracle.judge_evictions(leaves)
        self.checked()

    @rule(at=INDEX, more=st.lists(st.integers(0, 1), max_size=2), fewer=st.integers(0, 2), gives_up=st.booleans())
    def ask_again(self, at: int, more: list[int], fewer: int, gives_up: bool) -> None:
        """A refused or preempted sequence comes back, and leaves out tokens that the manager should have kept."""
        if not self.waiting:
            return
        (worker_id, sequence), (namespace, tokens) = sorted(self.waiting.items())[at % len(self.waiting)]
        worker = next(worker for worker in self.workers if worker.id == worker_id)
        kept = max(worker.kept.get(sequence, 0) - fewer, 0)
        if gives_up:
            if kept and self.remembers_all:
                worker.step(releases=[Release(SequenceId(sequence), ABORTED)])
                worker.kept.pop(sequence)
            del self.waiting[worker_id, sequence]
            return
        tokens = tokens + more
        self.waiting[worker_id, sequence] = namespace, tokens  # those that the manager may keep from now on
        oracle = self.oracles[worker.id]
        forecast, blurred = oracle.forecast(namespace, tokens, 0, 0), oracle.blurred()
        answer = worker.submit(tokens, namespace, sequence_id=sequence, kept=kept)
        if isinstance(answer, Refusal) and answer.reason is RefusalReason.RESEND:
            assert kept and not self.remembers_all, "what should have been kept was not"
        elif isinstance(answer, Refusal):
            judge_refusal(worker, answer, forecast, blurred)
        else:
            judge_grant(oracle, answer, forecast, [])
        if not isinstance(answer, Refusal) or answer.reason is RefusalReason.NEVER_FITS:
            del self.waiting[worker_id, sequence]
        self.checked()

    @rule(
        at=INDEX,
        kind=st.sampled_from(["acquire", "publish", "release", "extend", "adopt", "malformed"]),
        tokens=TOKENS,
    )
    def bad_item(self, at: int, kind: str, tokens: list[int]) -> None:
        """It is refused alone and changes nothing; a good one beside it is applied."""
        worker, nobody = self.worker(at), SequenceId(2**40)
        bad: dict[str, Any] = {
            "acquire": {"acquires": [Acquire(nobody, Namespace("model"), pack(tokens)[1:])]},
            "publish": {"publishes": [Publish(nobody, pack(tokens), 1)]},
            "release": {"releases": [Release(nobody, FINISHED)]},
            "extend": {"extends": [Extend(nobody, 4)]},
            "adopt": {"adopts": [Adopt(nobody, Namespace("model"), pack(tokens), len(tokens) + 1, ())]},
            "malformed": {"acquires": [BadItem(nobody, "namespace", "has an unknown field")]},
        }[kind]
        before = self.world.snapshot()
        (refusal,) = worker.raw_step(**bad).refusals
        assert (refusal.sequence_id, refusal.reason) == (nobody, RefusalReason.INVALID)
        assert self.world.snapshot() == before
        lives = [live for live in worker.live.values() if live.fetch is None]
        publishes = [worker.publish_of(live) for live in lives]
        reply = worker.raw_step(**{"publishes": publishes, **bad} if kind != "publish" else {"publishes": publishes})
        for live, publish in zip(lives, publishes, strict=True):
            worker.published(live, publish)
        assert len(reply.refusals) == (kind != "publish")
        self.checked()

    @rule(at=INDEX, size=st.integers(1, 6), ask=st.booleans(), leave_at=BOUNDARIES)
    def launch(self, at: int, size: int, ask: bool, leave_at: list[int]) -> None:
        found = self.live(at)
        if found is None or found[1].computed == len(found[1].tokens):
            return
        worker, live = found
        end = min(live.computed + size, len(live.tokens))
        if self.room(worker, live, end, ask, leave_at):
            worker.launch(live, end - live.computed)
        self.checked()

    def room(self, worker: FakeWorker, live: Live, end: int, ask: bool, leave_at: Sequence[int] = ()) -> bool:
        """Pages up to `end`, asked for where they are missing; the oracle knows whether there are any."""
        pages = -(-end // 2)
        tables = [g for g, spec in enumerate(worker.groups) if spec.kind != GroupKind.STATE]
        need = {g: max(0, pages - len(live.table(g))) for g in tables}
        if not ask and end <= live.room and not any(need.values()):
            return True
        oracle = self.oracles[worker.id]
        fits = all(n <= oracle.num_free(g) + len(oracle.evictable(g)) for g, n in need.items())
        blurred = oracle.blurred()
        granted = worker.extend(live, end, leave_at)
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

    @rule(at=INDEX, more=st.integers(0, 3))
    def shrink(self, at: int, more: int) -> None:
        """Pages ahead come back, and only those."""
        found = self.live(at)
        if found is None:
            return
        worker, live = found
        oracle = self.oracles[worker.id]
        free = [oracle.num_free(group) for group in range(len(worker.groups))]
        held = [len(table) for table in live.tables]
        assert not worker.shrink(live, max(len(live.tokens), live.computed) + more).refusals
        for group, spec in enumerate(worker.groups):
            if spec.kind != GroupKind.STATE:
                assert oracle.num_free(group) - free[group] == held[group] - len(live.tables[group])
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
        for group, boundary in live.snapshots:
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
        if reason == PREEMPTED:
            self.waiting[worker.id, live.id] = live.namespace, list(live.tokens)
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
            "releases": [worker.release_of(live) for live in gone],
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


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    # The compiled manager is several times as fast, and .ci/run tries both.
    max_examples=examples(500 if IS_COMPILED else 250),
    stateful_step_count=60 if THOROUGH else 35,
    suppress_health_check=list(HealthCheck),
)
