"""A small engine on a fake worker: queue, chunks, decode, preemption, slow transfers; one Step for each iteration.

Its scheduling is the plainest that the protocol allows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from session.messages import Ack, Acquire, Extend, Shrink, StepReply
from session.words import Namespace, RefusalReason, SequenceId, Transfer
from tests.core.driver import FakeWorker
from tests.core.shadow import Value
from tests.core.world import ABORTED, DONE, FAILED, FINISHED, MISSING, PREEMPTED, Live, ids, keys, pack

# How far beyond its need a row asks for pages, and how often it gives back what it holds ahead instead of asking.
AHEAD = (0, 0, 0, 9)
SHRINKS = 0.04


@dataclass(eq=False)
class Request:
    """What a client wants; `output` are the tokens that the model will say."""

    namespace: Namespace
    prompt: list[int]
    output: list[int]
    said: int = 0
    priority: int = 0
    aborts_at: int = -1
    bypass: bool = False
    sequence: int = 0  # of its last attempt; the next one has the same, and may leave out what was kept

    def tokens(self) -> list[int]:
        return self.prompt + self.output[: self.said]

    def finished(self) -> bool:
        return self.said == len(self.output)


@dataclass(eq=False)
class Running:
    request: Request
    live: Live
    refused: int = 0
    due: int = 0


@dataclass
class Engine:
    worker: FakeWorker
    rng: Random
    budget: int = 12
    slowness: int = 3
    queue: deque[Request] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    ending: list[tuple[Running, Any]] = field(default_factory=list)
    moves: list[tuple[int, Transfer, dict[bytes, Value]]] = field(default_factory=list)
    clock: int = 0
    blocked: bool = False
    busy: bool = False
    done: int = 0
    cached: int = 0
    fetched: int = 0
    is_cut_off: bool = False  # from the host tier
    refused_for_ever: int = 0

    def idle(self) -> bool:
        return not (self.queue or self.running or self.ending)

    def iterate(self) -> None:
        """One step, its reply, one launch."""
        self.clock += 1
        acks, fetched = self._acks()
        lag = self.rng.choice([0, 0, 1])
        said = [r for r in self.running if r.live.fetch is None and r not in fetched]
        publishes = [self.worker.publish_of(r.live, max(r.live.reported, r.live.computed - lag)) for r in said]
        ending, self.ending = self.ending, []
        publishes += [self.worker.publish_of(r.live) for r, why in ending if why is FINISHED]
        shrinking = [r for r in said if self.rng.random() < SHRINKS]
        asking = [r for r in said if self._target(r) > r.live.computed and r not in shrinking]
        shrinks = [Shrink(SequenceId(r.live.id), max(len(r.live.tokens), r.live.computed)) for r in shrinking]
        acquires = self._acquires(bool(ending))
        # Asked before the step: a reply that got lost voids the spill orders that made it a refusal.
        self.busy = bool(self.running or self.worker.orphans or self.worker.spills or acks)
        reply = self.worker.step(
            acks=acks,
            publishes=publishes,
            releases=[self.worker.release_of(r.live, why) for r, why in ending],
            extends=[Extend(SequenceId(r.live.id), self._target(r) + self.rng.choice(AHEAD)) for r in asking],
            acquires=[acquire for acquire, _ in acquires],
            shrinks=shrinks,
        )
        for r, shrink in zip(shrinking, shrinks, strict=True):
            self.worker.shrunk(r.live, shrink.num_tokens)
        by_id = {publish.sequence_id: publish for publish in publishes}
        for r in said:
            self.worker.published(r.live, by_id[SequenceId(r.live.id)])
        for r, why in ending:
            self.worker.released(r.live, why)
        self._replanned(fetched, reply)
        self._admitted(acquires, reply)
        self._launch(asking, shrinking, reply)

    # -- what goes into the step -------------------------------------------------------------------------------

    def _acks(self) -> tuple[list[Ack], list[Running]]:
        acks: list[Ack] = []
        fetched = [r for r in self.running if r.live.fetches and r.due <= self.clock]
        for r in fetched:
            # All of them, or some now and the others later, in any order.
            self.rng.shuffle(r.live.fetches)
            while r.live.fetches and self.rng.random() < 0.8:
                acks.append(self._ack_fetch(r.live.fetches.pop()))
        for ticket, fetch in list(self.worker.orphans.items()):
            if self.rng.random() < 0.5:
                acks.append(self._ack_fetch(fetch))
                del self.worker.orphans[ticket]
        while self.worker.spills and self.rng.random() < 0.4:
            acks.append(self._ack_spill(*self.worker.spills.pop(self.rng.randrange(len(self.worker.spills)))))
        return acks, fetched

    def _ack_fetch(self, fetch: Transfer) -> Ack:
        cut = self.rng.choice([None, None, None, self.rng.randrange(fetch.num_pages + 1)])
        if self.is_cut_off:
            return Ack(fetch.ticket, 0, FAILED, 0, 0.001)
        done = self.worker.read_host(fetch, cut)
        status = DONE if done == fetch.num_pages else FAILED if done == cut else MISSING
        return Ack(fetch.ticket, done, status, 64 * done, 0.001 * self.rng.random())

    def _ack_spill(self, order: Transfer, expected: dict[bytes, Value]) -> Ack:
        done = order.num_pages if self.rng.random() < 0.8 else self.rng.randrange(order.num_pages)
        for part in order.groups:
            for page, key in list(zip(ids(part.page_ids), keys(part), strict=True))[:done]:
                if page:
                    assert self.worker.shadow.value(part.group, page) == expected[key], "a page changed under its spill"
                    self.worker.store[key] = expected[key]
        return Ack(order.ticket, done, DONE if done == order.num_pages else FAILED, 64 * done, 0.001)

    def _target(self, r: Running) -> int:
        """The length that the coming launch wants: a chunk of the prompt, or one sampled token and perhaps a draft."""
        live = r.live
        if live.computed < len(live.tokens) - 1 or live.computed < live.prompt_len:
            return min(len(live.tokens), live.computed + self.budget)
        return len(live.tokens)

    def _acquires(self, freed: bool) -> list[tuple[Acquire, Request]]:
        if freed or not self.running:
            self.blocked = False
        if self.blocked:
            return []
        picked = [self.queue[i] for i in range(min(self.rng.randrange(1, 4), len(self.queue)))]
        return [(self._acquire(request), request) for request in picked]

    def _acquire(self, request: Request) -> Acquire:
        """Tokens that the manager should have kept are left out."""
        if not request.sequence:
            self.worker.world.next_sequence += 1
            request.sequence = self.worker.world.next_sequence
        tokens = request.tokens()
        kept = self.worker.kept.get(request.sequence, 0)
        return Acquire(
            SequenceId(request.sequence),
            request.namespace,
            pack(tokens[kept:]),
            0,
            self.budget,
            request.priority,
            kept,
            request.bypass,
            tuple(4 * page for page in range(1, 9) if self.rng.random() < 0.05),
        )

    # -- what comes out of the reply ---------------------------------------------------------------------------

    def _replanned(self, fetched: list[Running], reply: StepReply) -> None:
        for r in fetched:
            self.worker.fetched(r.live, reply)
            self._count(r.live)
            r.due = self.clock + self.rng.randrange(1, self.slowness + 1)
            if r.live.ended:
                self.running.remove(r)
                self.queue.appendleft(r.request)

    def _admitted(self, acquires: list[tuple[Acquire, Request]], reply: StepReply) -> None:
        reasons = {refusal.sequence_id: refusal.reason for refusal in reply.refusals}
        for acquire, request in acquires:
            reason = reasons.get(acquire.sequence_id)
            if reason == RefusalReason.NO_ROOM:
                assert self.busy or self.worker.live, "an idle worker refused"
                self.blocked = True
                continue
            if reason == RefusalReason.RESEND:
                assert acquire.kept_tokens
                continue
            self.queue.remove(request)
            if reason == RefusalReason.NEVER_FITS:
                self.refused_for_ever += 1
                continue
            live = self.worker.taken(acquire._replace(tokens=pack(request.tokens()), kept_tokens=0), reply)
            assert isinstance(live, Live)
            self._count(live)
            self.running.append(Running(request, live, due=self.clock + self.rng.randrange(1, self.slowness + 1)))

    def _count(self, live: Live) -> None:
        if live.fetch is None and not live.ended:
            self.cached += live.grant.cached_tokens
            self.fetched += live.grant.fetched_tokens

    def _launch(self, asking: list[Running], resting: list[Running], reply: StepReply) -> None:
        refused = {refusal.sequence_id for refusal in reply.refusals}
        for r in list(self.running):
            if r not in self.running or r in resting or r.live.fetch is not None or r.live.ended:
                continue
            if r in asking and r.live.id in refused:
                r.refused += 1
                if r.refused > 1:
                    self._preempt(r)
                continue
            if r in asking or r.live.computed == r.live.grant.usable_tokens:
                r.refused = 0
                self._run(r)

    def _run(self, r: Running) -> None:
        if any(r is gone for gone, _ in self.ending):
            return
        live, request = r.live, r.request
        self.worker.launch(live, min(len(live.tokens), live.computed + self.budget) - live.computed)
        if live.computed < len(live.tokens):
            return
        if request.said == request.aborts_at:
            self._end(r, ABORTED)
        elif request.finished():
            self._end(r, FINISHED)
        else:
            more = request.output[request.said : request.said + self.rng.choice([1, 1, 1, 2])]
            live.append(more)
            request.said += len(more)

    def _end(self, r: Running, why: Any) -> None:
        self.running.remove(r)
        self.ending.append((r, why))
        if why in (FINISHED, ABORTED):
            self.done += 1

    def _preempt(self, r: Running) -> None:
        """The youngest younger sequence goes, or this one itself; the oldest never does."""
        younger = [other for other in self.running[self.running.index(r) + 1 :] if other.live.fetch is None]
        victim = younger[-1] if younger else r
        if victim is self.running[0] and len(self.running) > 1:
            return
        if victim is self.running[0] and self.worker.orphans | dict.fromkeys(range(len(self.worker.spills))):
            return
        self.running.remove(victim)
        self.ending.append((victim, PREEMPTED))
        self.queue.appendleft(victim.request)
