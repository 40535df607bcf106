"""Composes the next step: acks, publishes, releases, extends for the predicted launch, acquires for the queue's head.

Knows no answer beyond which sequences were asked for; inbox.py applies replies.

When an acquire was refused, the queue waits until something was freed: a lease other than a preempted one ended, a
ticket was acknowledged, a remap returned pages, or a WINDOW or STATE group left pages behind. The pages of a preempted
sequence do not count: they were taken for an older one.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from worker_service.core.holding import Siblings
from worker_service.core.launch_plan import (
    UNLIMITED,
    Plan,
    Progress,
    SchedulerConfig,
    decode_need,
    first_chunk_limit,
    plan_launch,
)
from worker_service.core.ports import (
    Ack,
    Acquire,
    Extend,
    GroupKind,
    Publish,
    Rates,
    Release,
    ReleaseReason,
    SequenceId,
    Step,
    TicketId,
)
from worker_service.core.roster import Departure, Roster
from worker_service.core.sequence import Sequence, State


class Ask(Enum):
    ACQUIRE = "acquire"
    EXTEND = "extend"
    REPLAN = "replan"


class Asked(NamedTuple):
    """`length` is what the sequence has room for once this is granted; of an acquire, beyond its usable tokens."""

    sequence: Sequence
    ask: Ask
    length: int


class Outbox:
    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._config = config
        self._roster = roster
        self._acks: list[Ack] = []
        self._last_step_id = 0
        self._refused: Sequence | None = None  # the head of the queue waits for pages
        self._leftovers: frozenset[SequenceId] = frozenset()
        self._only_full = all(group.kind is GroupKind.FULL for group in config.groups)
        self._paged = config.paged_groups
        self.rates: Rates | None = None
        self.tickets: dict[TicketId, Sequence] = {}  # open fetch tickets of sequences that wait for them
        self.unanswered: Step | None = None
        self.asked: dict[SequenceId, Asked] = {}
        self.num_held = 0

    # -- what happened since the last step --

    def report(self, ack: Ack) -> None:
        self._acks.append(ack)

    def refused(self, sequence: Sequence) -> None:
        """Of several the first in the queue counts: it blocks all behind it."""
        former = self._refused
        if former is None or former.state is not State.WAITING or sequence.rank < former.rank:
            self._refused = sequence

    def freed(self) -> None:
        self._refused = None

    def answered(self) -> dict[SequenceId, Asked]:
        asked, self.asked = self.asked, {}
        self.unanswered = None
        return asked

    def reset(self, last_step_id: int, leftovers: frozenset[SequenceId]) -> None:
        """A manager that does not know where this worker stands: tickets, acks and the unanswered step are void.

        `leftovers` are leases that it has from before; they end with the next step.
        """
        self.answered()
        self._leftovers = leftovers
        self._acks.clear()
        self.tickets.clear()
        self._last_step_id = last_step_id
        self.freed()

    # -- the next step --

    def next_step(self) -> Step | None:
        assert self.unanswered is None, "one unanswered step at a time"
        departing = self._departing()
        acks = self._take_acks({departure.sequence.sequence_id for departure in departing})
        publishes = self._publishes(departing)
        releases = self._releases(departing)
        frees = self._frees(acks, publishes, releases)
        if frees:
            self.freed()
        preempted = self._end_leases(departing)
        extends = self._extends()
        acquires = self._acquires()
        for sequence in preempted:
            self._roster.enqueue(sequence)
            if not frees:
                self.refused(sequence)
        if not (acks or publishes or releases or extends or acquires):
            return None
        self._last_step_id += 1
        self.unanswered = Step(self._last_step_id, acks, publishes, releases, extends, acquires, self.rates)
        self.rates = None
        return self.unanswered

    def _frees(self, acks: tuple[Ack, ...], publishes: tuple[Publish, ...], releases: tuple[Release, ...]) -> bool:
        left_behind = bool(publishes) and not self._only_full
        return left_behind or bool(acks) or any(r.reason is not ReleaseReason.PREEMPTED for r in releases)

    def _departing(self) -> list[Departure]:
        """Leases to end now. A preempted sequence in flight stays until its launch has ended: no token is lost."""
        departures = self._roster.departures
        departing = [
            departure
            for departure in departures.values()
            if not (departure.sequence.in_flight and departure.reason == ReleaseReason.PREEMPTED)
        ]
        for departure in departing:
            del departures[departure.sequence.sequence_id]
        return departing

    def _take_acks(self, departing: set[SequenceId]) -> tuple[Ack, ...]:
        """Acks for this step. That of a departing sequence follows its release, or it would be granted pages anew."""
        now: list[Ack] = []
        later: list[Ack] = []
        for ack in self._acks:
            sequence = self.tickets.get(ack.ticket)
            if sequence is not None and sequence.sequence_id in departing:
                later.append(ack)
                continue
            now.append(ack)
            if sequence is not None:
                self.asked[sequence.sequence_id] = Asked(
                    sequence, Ask.REPLAN, first_chunk_limit(len(sequence.tokens), self._config)
                )
                del self.tickets[ack.ticket]
        self._acks = later
        return tuple(now)

    def _publishes(self, departing: list[Departure]) -> tuple[Publish, ...]:
        candidates = [d.sequence for d in departing if d.publishes]
        gone = {d.sequence.sequence_id for d in departing}
        candidates += [sequence for sequence in self._roster.leased if sequence.sequence_id not in gone]
        return tuple(publish for sequence in candidates if (publish := self._publish(sequence)) is not None)

    def _publish(self, sequence: Sequence) -> Publish | None:
        """Filled pages, and the end of the launch that restored a snapshot: until then the snapshot is pinned."""
        page_tokens = self._config.page_tokens
        computed = sequence.computed_len
        fills_page = computed // page_tokens > sequence.published_len // page_tokens
        if not fills_page and not (sequence.restore and computed > sequence.start_len):
            return None
        tokens = sequence.tokens[sequence.known_len : computed].tobytes()
        sequence.known_len = max(sequence.known_len, computed)
        sequence.published_len = computed
        sequence.restore = ()
        return Publish(sequence.sequence_id, tokens, computed)

    def _releases(self, departing: list[Departure]) -> tuple[Release, ...]:
        leftovers = [Release(sequence_id, ReleaseReason.ABORTED) for sequence_id in self._leftovers]
        self._leftovers = frozenset()
        return (*leftovers, *(Release(d.sequence.sequence_id, d.reason) for d in departing))

    def _end_leases(self, departing: list[Departure]) -> list[Sequence]:
        """Returns the preempted ones: they queue again only behind this step's acquires."""
        for departure in departing:
            self._roster.end_lease(departure.sequence)
            self._forget_tickets(departure.sequence)
        return [d.sequence for d in departing if d.reason == ReleaseReason.PREEMPTED]

    def _forget_tickets(self, sequence: Sequence) -> None:
        for ticket in [ticket for ticket, waiter in self.tickets.items() if waiter is sequence]:
            del self.tickets[ticket]

    # -- pages for the launch after the one in flight --

    def room(self, sequence: Sequence) -> int:
        """The length in tokens that the pages at hand hold, in the group that has fewest.

        With WINDOW or STATE groups a prompt goes no further than was asked: their pages and slots come by the chunk.
        """
        tables, page_tokens = sequence.tables, self._config.page_tokens
        if self._only_full and len(tables) == 1:
            return len(tables[0]) * page_tokens
        pages = min([len(tables[group]) for group in self._paged], default=UNLIMITED)
        if not self._only_full and sequence.launched_len < sequence.in_prefill_until:
            return min(pages * page_tokens, sequence.granted_len)
        return pages * page_tokens

    def predicted(self) -> Iterator[Progress]:
        """Where running sequences stand once the launch in flight has ended."""
        for sequence in self._roster.leased:
            if sequence.state is not State.RUNNING:
                continue
            computed, length = sequence.launched_len, len(sequence.tokens)
            if sequence.in_flight and computed == length:
                if (
                    sequence.num_generated + 1 >= sequence.sampling.max_tokens
                    or length + 1 >= self._config.max_model_len
                ):
                    continue
                computed += self._config.decode_lookahead
                length = computed + 1
            yield Progress(sequence, computed, length, self.room(sequence))

    def _extends(self) -> tuple[Extend, ...]:
        """Oldest first, but those that sat out a launch before all others."""
        plan = plan_launch(self.predicted(), self._config, within_room=False)
        needs = list(self._needs(plan))
        needs.sort(key=lambda entry: (entry[0].num_refused_extends == 0, entry[0].rank))
        for sequence, need in needs:
            self.asked[sequence.sequence_id] = Asked(sequence, Ask.EXTEND, need)
        return tuple(Extend(sequence.sequence_id, need) for sequence, need in needs)

    def _needs(self, plan: Plan) -> Iterator[tuple[Sequence, int]]:
        """Rows that lack room, and the length to extend to."""
        for index, (sequence, first, num_tokens) in enumerate(plan.rows):
            is_decode = index < plan.num_decode
            need = decode_need(first, self._config) if is_decode else first + num_tokens
            if need > self.room(sequence):
                yield sequence, need

    # -- admission --

    def _acquires(self) -> tuple[Acquire, ...]:
        chosen: list[Sequence] = []
        acquires: list[Acquire] = []
        if self._may_admit():
            chosen = self._choose(min(self._config.max_acquires, self._config.max_num_seqs - len(self._roster.leased)))
            self._roster.take(chosen)
        for sequence in chosen:
            self.asked[sequence.sequence_id] = Asked(
                sequence, Ask.ACQUIRE, first_chunk_limit(len(sequence.tokens), self._config)
            )
            sequence.known_len = len(sequence.tokens)
            acquires.append(self._acquire(sequence, alone=not (self._roster.leased or acquires)))
        return tuple(acquires)

    def _may_admit(self) -> bool:
        """Not while a running sequence lacks pages, nor while the prompts that were admitted fill the next launch."""
        threshold = self._config.long_prefill_token_threshold or UNLIMITED
        backlog = 0
        for sequence in self._roster.leased:
            if sequence.num_refused_extends:
                return False
            backlog += min(max(sequence.in_prefill_until - sequence.launched_len, 0), threshold)
        return backlog < self._config.token_budget

    def _choose(self, limit: int) -> list[Sequence]:
        """From the head on. A held request blocks nobody; a refused one blocks all behind it, or it would starve."""
        siblings = Siblings(self._config.page_tokens)
        for sequence in self._roster.leased:
            siblings.admit(sequence)
        chosen: list[Sequence] = []
        num_held = 0
        for sequence in self._roster.waiting:
            if len(chosen) >= limit:
                break
            if siblings.hold(sequence):
                num_held += 1
            elif sequence is self._refused:
                break
            else:
                chosen.append(sequence)
                siblings.admit(sequence)
        self.num_held = num_held
        return chosen

    def _acquire(self, sequence: Sequence, *, alone: bool) -> Acquire:
        """A sequence alone needs no reserve: kept free for nobody, it would refuse the longest prompt for ever."""
        return Acquire(
            sequence.sequence_id,
            sequence.namespace,
            sequence.packed_tokens(),
            0 if alone else self._config.reserve_pages,
            first_chunk_limit(len(sequence.tokens), self._config),
            sequence.request.priority,
        )
