"""Builds the next step: acks, publishes, releases, extends for the predicted launch, acquires for the queue's head.

reply_handler.py applies replies. What does not fit into a step goes with
the next one.

When an acquire was refused, the queue waits until something was freed: a lease other than a preempted one ended, a
ticket was acknowledged, a remap returned pages, a WINDOW or STATE group left pages behind, or pages ahead were given
back. The pages of a preempted sequence do not count: they were taken for an older one.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from session.limits import MAX_SNAPSHOT_BOUNDARIES
from session.messages import Ack, Acquire, Adopt, Extend, Publish, Rates, Release, Shrink, Step
from session.words import GroupKind, ReleaseReason, SequenceId, TicketId
from worker_service.core.admission import Admission
from worker_service.core.adoption import Adoptions
from worker_service.core.launch_plan import UNLIMITED, Plan, Progress, decode_need, first_chunk_limit, plan_launch
from worker_service.core.limits import BOUNDARY_BYTES, ITEM_BYTES, MessageRoom, Terms
from worker_service.core.queues import Departure, Queues
from worker_service.core.restoration import PageRecords
from worker_service.core.sequence import Sequence, State

# Steps without extends beyond the need after one was refused.
AHEAD_PAUSE_STEPS = 32


class Ask(Enum):
    ACQUIRE = "acquire"
    ADOPT = "adopt"
    EXTEND = "extend"
    REPLAN = "replan"


class Asked(NamedTuple):
    """`length` is the number of tokens that the sequence has room for once this is granted.

    An acquire's usable tokens come on top. `is_ahead`: an extend that asks for more than the next launch needs.
    """

    sequence: Sequence
    ask: Ask
    length: int
    is_ahead: bool = False


class StepBuilder:
    def __init__(
        self, terms: Terms, queues: Queues, admission: Admission, adoptions: Adoptions, pages: PageRecords
    ) -> None:
        self._recorder, self._restoration = pages
        self._terms = terms
        self._queues = queues
        self._admission = admission
        self._adoptions = adoptions
        self._acks: list[Ack] = []
        self._last_step_id = 0
        self._ahead_from_step = 0
        self._lacks_pages = False  # whether a request waited for pages when this step was begun
        config = terms.config
        self._only_full = all(group.kind is GroupKind.FULL for group in config.groups)
        self._has_states = len(config.paged_groups) < len(config.groups)
        self._paged = config.paged_groups
        self._page_tokens = config.page_tokens
        self.rates: Rates | None = None
        self.free_pages: tuple[int, ...] = ()  # by group, after the last step that got a reply
        self.may_shrink = False  # whether the cache service takes back pages that are held ahead
        self.tickets: dict[TicketId, Sequence] = {}  # open fetch tickets of sequences that wait for them
        self.unanswered: Step | None = None
        self.asked: dict[SequenceId, Asked] = {}

    # -- what happened since the last step --

    def report(self, ack: Ack) -> None:
        self._acks.append(ack)

    def take_asked(self) -> dict[SequenceId, Asked]:
        asked, self.asked = self.asked, {}
        self.unanswered = None
        return asked

    def is_at(self, last_step_id: int) -> bool:
        """Returns whether the cache service is at the last step with a reply, or one further: its reply was lost."""
        step = self.unanswered
        return last_step_id in ((self._last_step_id,) if step is None else (step.step_id - 1, step.step_id))

    def reset(self, last_step_id: int) -> None:
        """Drops tickets, acks and the unanswered step: the cache service has a new state for this worker."""
        self.take_asked()
        self._acks.clear()
        self.tickets.clear()
        self._last_step_id = last_step_id
        self._ahead_from_step = last_step_id
        self.free_pages = ()
        self._admission.freed()

    # -- the next step --

    def next_step(self) -> Step | None:
        assert self.unanswered is None, "one unanswered step at a time"
        adopts = self._adopts()
        if adopts:
            return self._numbered(Step(0, adopts=adopts))
        room = self._terms.room()
        departing = self._departing(room)
        acks = self._take_acks({departure.sequence.sequence_id for departure in departing}, room)
        publishes = self._publishes(departing, room)
        releases = (*self._releases(departing), *self._forget_kept(room))
        preempted = self._end_leases(departing)
        # Also while the request that waits asks again below: it is to get what is freed.
        self._lacks_pages = self._admission.lacks_pages
        shrinks = self._shrinks(room)
        frees = bool(shrinks) or self._frees(acks, publishes, departing)
        if frees:
            self._admission.freed()
        self._admission.note_branches()
        extends = self._extends(room)
        inventory = self._restoration.take(room, self._terms.limits.max_adopt_pages)
        acquires = self._acquires()
        for sequence in preempted:
            self._queues.enqueue(sequence)
            if not frees:
                self._admission.refused(sequence)
        forgotten = self._recorder.take_confirmation()
        if not (acks or publishes or releases or shrinks or extends or acquires or inventory is not None or forgotten):
            return None
        rates, self.rates = self.rates, None
        step = Step(0, acks, publishes, releases, (), extends, acquires, rates, inventory, forgotten, shrinks)
        return self._numbered(step)

    def _numbered(self, step: Step) -> Step:
        self._last_step_id += 1
        self.unanswered = step._replace(step_id=self._last_step_id)
        return self.unanswered

    def _frees(self, acks: tuple[Ack, ...], publishes: tuple[Publish, ...], departing: list[Departure]) -> bool:
        left_behind = bool(publishes) and not self._only_full
        return left_behind or bool(acks) or any(d.reason is not ReleaseReason.PREEMPTED for d in departing)

    def _departing(self, room: MessageRoom) -> list[Departure]:
        """Returns the leases to end now. A preempted sequence in flight keeps its own until its launch has ended."""
        departures = self._queues.departures
        departing = [
            departure
            for departure in departures.values()
            if not (departure.sequence.in_flight and departure.reason == ReleaseReason.PREEMPTED) and room.take(Release)
        ]
        for departure in departing:
            del departures[departure.sequence.sequence_id]
        return departing

    def _take_acks(self, departing: set[SequenceId], room: MessageRoom) -> tuple[Ack, ...]:
        """Returns the acks of this step.

        A departing sequence's ack waits for its release, or it would be granted new pages.
        """
        now: list[Ack] = []
        later: list[Ack] = []
        for ack in self._acks:
            sequence = self.tickets.get(ack.ticket)
            is_departing = sequence is not None and sequence.sequence_id in departing
            if is_departing or not room.take(Ack):
                later.append(ack)
                continue
            now.append(ack)
            if sequence is not None:
                del self.tickets[ack.ticket]
                if sequence not in self.tickets.values():  # the reply to the last ack is a new plan
                    self.asked[sequence.sequence_id] = Asked(
                        sequence, Ask.REPLAN, first_chunk_limit(len(sequence.tokens), self._terms.config)
                    )
        self._acks = later
        return tuple(now)

    def _publishes(self, departing: list[Departure], room: MessageRoom) -> tuple[Publish, ...]:
        """Returns publishes, a departing sequence's first: it has no later step."""
        candidates = [d.sequence for d in departing if d.publishes]
        gone = {d.sequence.sequence_id for d in departing}
        candidates += [sequence for sequence in self._queues.leased if sequence.sequence_id not in gone]
        return tuple(publish for sequence in candidates if (publish := self._publish(sequence, room)) is not None)

    def _publish(self, sequence: Sequence, room: MessageRoom) -> Publish | None:
        """Publishes filled pages, and the end of the launch that restored a snapshot.

        Until then the snapshot is pinned.
        """
        computed = sequence.computed_len
        fills_page = computed // self._page_tokens > sequence.published_len // self._page_tokens
        if not fills_page and not (sequence.restore and computed > sequence.start_len):
            return None
        tokens = sequence.tokens[sequence.known_len : computed].tobytes()
        if not room.take(Publish, ITEM_BYTES + len(tokens)):
            return None
        self._recorder.published(sequence)
        sequence.known_len = max(sequence.known_len, computed)
        sequence.published_len = computed
        sequence.restore = ()
        return Publish(sequence.sequence_id, tokens, computed)

    def _releases(self, departing: list[Departure]) -> tuple[Release, ...]:
        releases = []
        for departure in departing:
            rolling_tokens = self.rolling_tokens(departure)
            self._recorder.released(departure.sequence, rolling_tokens)
            releases.append(Release(departure.sequence.sequence_id, departure.reason, rolling_tokens))
        return tuple(releases)

    def _forget_kept(self, room: MessageRoom) -> tuple[Release, ...]:
        """Returns releases for requests that were aborted while they waited.

        The cache service drops their kept tokens.
        """
        forgotten = self._queues.forgotten
        self._queues.forgotten = [sequence_id for sequence_id in forgotten if not room.take(Release)]
        num_taken = len(forgotten) - len(self._queues.forgotten)
        return tuple(Release(sequence_id, ReleaseReason.ABORTED) for sequence_id in forgotten[:num_taken])

    def rolling_tokens(self, departure: Departure) -> int:
        """Returns the boundary whose state the departing sequence's rolling slots hold; 0: none of use."""
        is_aborted = departure.reason is ReleaseReason.ABORTED
        return 0 if is_aborted else departure.sequence.rolling_boundary(self._page_tokens)

    def _end_leases(self, departing: list[Departure]) -> list[Sequence]:
        """Ends these leases. Returns the preempted sequences, which queue again only after this step's acquires."""
        preempted = [d.sequence for d in departing if d.reason == ReleaseReason.PREEMPTED]
        for sequence in preempted:
            sequence.kept_len = self._admission.keeps(sequence.known_len)
        for departure in departing:
            self._queues.end_lease(departure.sequence)
            self._forget_tickets(departure.sequence)
        return preempted

    def _forget_tickets(self, sequence: Sequence) -> None:
        for ticket in [ticket for ticket, waiter in self.tickets.items() if waiter is sequence]:
            del self.tickets[ticket]

    # -- pages for the launch after the one in flight --

    def room(self, sequence: Sequence) -> int:
        """Returns the length in tokens that the sequence's pages hold, in the group that has fewest.

        With WINDOW or STATE groups a prompt goes no further than was asked: their pages are granted chunk by chunk.
        """
        tables, page_tokens = sequence.tables, self._page_tokens
        if self._only_full and len(tables) == 1:
            return len(tables[0]) * page_tokens
        pages = min([len(tables[group]) for group in self._paged], default=UNLIMITED)
        if not self._only_full and sequence.launched_len < sequence.in_prefill_until:
            return min(pages * page_tokens, sequence.granted_len)
        return pages * page_tokens

    def predicted(self) -> Iterator[Progress]:
        """Yields the state of running sequences once the launches in flight have ended.

        A sequence whose pending token is its last one by length is left out.
        """
        config, running = self._terms.config, State.RUNNING
        longest, page_tokens = config.max_model_len, self._page_tokens
        is_plain = self._only_full and len(config.groups) == 1
        for sequence in self._queues.leased:
            if sequence.state is not running:
                continue
            computed, num_pending = sequence.launched_len, sequence.num_pending
            length = len(sequence.tokens) + num_pending
            if num_pending:
                if length >= sequence.end_len or length >= longest:
                    continue
                computed += config.decode_lookahead
                length = computed + 1
            room = len(sequence.tables[0]) * page_tokens if is_plain else self.room(sequence)
            yield Progress(sequence, computed, length, room)

    def _extends(self, room: MessageRoom) -> tuple[Extend, ...]:
        """Returns extends, oldest first, but sequences that missed a launch before all others."""
        num_waiting = len(self._queues.waiting)
        plan = plan_launch(self.predicted(), self._terms.config, within_room=False, num_waiting=num_waiting)
        needs = list(self._needs(plan))
        needs.sort(key=lambda asked: (asked.sequence.num_refused_extends == 0, asked.sequence.queue_order))
        needs = [asked for asked in needs if room.take(Extend, _extend_bytes(asked.sequence))]
        self.asked.update((asked.sequence.sequence_id, asked) for asked in needs)
        return tuple(Extend(asked.sequence.sequence_id, asked.length, asked.sequence.snapshot_at()) for asked in needs)

    def _needs(self, plan: Plan) -> Iterator[Asked]:
        """Yields what to ask for rows that lack pages, or soon will."""
        config = self._terms.config
        rooms = [self.room(row.sequence) for row in plan.rows]
        ahead = self._ahead_tokens(plan, rooms)
        # Ask once a quarter of it, or a page, is used up: not at each token.
        refill = max(ahead - max(ahead // 4, min(ahead // 2, self._page_tokens)), 0)
        for index, (sequence, first, num_tokens) in enumerate(plan.rows):
            room = rooms[index]
            if index >= plan.num_decode:
                if first + num_tokens > room:
                    yield Asked(sequence, Ask.EXTEND, first + num_tokens)
                continue
            need = decode_need(first, config)
            wanted = min(need + ahead, max(sequence.end_len, need), config.max_model_len)
            if need > room or min(need + refill, wanted) > room:
                yield Asked(sequence, Ask.EXTEND, wanted, is_ahead=wanted > need)

    def _ahead_tokens(self, plan: Plan, rooms: list[int]) -> int:
        """Returns for how many tokens beyond its need a decode row asks pages.

        Half of what is free or held ahead is for the rows, in equal parts: the other half is there for the prompts to
        come, so that nothing is evicted for pages ahead. In a full pool, and while a request waits for pages, it is
        `decode_ahead_tokens`.
        """
        config = self._terms.config
        # An extend also reserves snapshot slots, which are too few for boundaries that may not be reached.
        if self._has_states or self._last_step_id < self._ahead_from_step:
            return 0
        least, num_decode = config.decode_ahead_tokens, plan.num_decode
        if not self.free_pages or not num_decode or self._lacks_pages or self._restoration.is_pending:
            return least
        held = sum(rooms[:num_decode]) - sum([row.end for row in plan.rows[:num_decode]])
        spare = min([self.free_pages[group] for group in self._paged]) * self._page_tokens + held
        return max(least, min(spare // (2 * num_decode), config.max_decode_ahead_tokens))

    def _shrinks(self, room: MessageRoom) -> tuple[Shrink, ...]:
        """Gives back the pages ahead of rows that decode, but for `decode_ahead_tokens`, while a sequence lacks pages.

        Launches in flight write to none of them, and the next one is planned without them.
        """
        is_short = self._lacks_pages or any(one.num_refused_extends for one in self._queues.leased)
        if not self.may_shrink or not is_short:
            return ()
        shrinks = []
        for sequence, computed, length, _ in self.predicted():
            if computed >= sequence.in_prefill_until:
                kept = max(decode_need(computed, self._terms.config), length, sequence.written_len)
                num_pages = -(-(kept + self._terms.config.decode_ahead_tokens) // self._page_tokens)
                kept = num_pages * self._page_tokens
                if kept < self.room(sequence) and room.take(Shrink):
                    sequence.drop_pages(num_pages)
                    shrinks.append(Shrink(sequence.sequence_id, kept))
        return tuple(shrinks)

    def refused_ahead(self) -> None:
        """Notes that no pages are free to hold ahead: for some steps rows ask for what they need only."""
        self._ahead_from_step = self._last_step_id + AHEAD_PAUSE_STEPS

    # -- new leases --

    def _acquires(self) -> tuple[Acquire, ...]:
        asking = self._admission.acquires(self._terms.room())
        for sequence, _ in asking:
            length = first_chunk_limit(len(sequence.tokens), self._terms.config)
            self.asked[sequence.sequence_id] = Asked(sequence, Ask.ACQUIRE, length)
            sequence.known_len = len(sequence.tokens)
        return tuple(acquire for _, acquire in asking)

    def _adopts(self) -> tuple[Adopt, ...]:
        asking = self._adoptions.take(self._terms.room())
        for sequence, _ in asking:
            self.asked[sequence.sequence_id] = Asked(sequence, Ask.ADOPT, sequence.computed_len)
        return tuple(adopt for _, adopt in asking)


def _extend_bytes(sequence: Sequence) -> int:
    return ITEM_BYTES + BOUNDARY_BYTES * min(len(sequence.branches), MAX_SNAPSHOT_BOUNDARIES)
