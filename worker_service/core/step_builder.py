"""Builds the next step: acks, publishes and releases; shrinks and extends of running_pages.py, adopts of adoption.py,
runs of restoration.py, acquires of admission.py.

reply_handler.py applies replies. What does not fit into a step goes with the next one.

When an acquire was refused, the queue waits until something was freed: a lease other than a preempted one ended, a
ticket was acknowledged, a remap returned pages, a WINDOW or STATE group left pages behind, or pages ahead were given
back. The pages of a preempted sequence do not count: they were taken for an older one.
"""

from __future__ import annotations

from session.messages import Ack, Acquire, Adopt, Extend, Publish, Rates, Release, Step
from session.words import GroupKind, ReleaseReason, SequenceId, TicketId
from worker_service.core.admission import Admission
from worker_service.core.adoption import Adoptions
from worker_service.core.asked import Ask, Asked
from worker_service.core.launch_plan import first_chunk_limit
from worker_service.core.limits import ITEM_BYTES, MessageBudget, Terms
from worker_service.core.queues import Departure, Queues
from worker_service.core.restoration import PageRecords
from worker_service.core.running_pages import RunningPages
from worker_service.core.sequence import Sequence


class StepBuilder:
    def __init__(
        self,
        terms: Terms,
        queues: Queues,
        admission: Admission,
        adoptions: Adoptions,
        running_pages: RunningPages,
        pages: PageRecords,
    ) -> None:
        self._recorder, self._restoration = pages
        self._terms = terms
        self._queues = queues
        self._admission = admission
        self._adoptions = adoptions
        self._running_pages = running_pages
        self._acks: list[Ack] = []
        self._last_step_id = 0
        self._only_full = all(group.kind is GroupKind.FULL for group in terms.config.groups)
        self._page_tokens = terms.config.page_tokens
        self.rates: Rates | None = None
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
        self._running_pages.reset()
        self._admission.freed()

    # -- the next step --

    def next_step(self) -> Step | None:
        assert self.unanswered is None, "one unanswered step at a time"
        adopts = self._adopts()
        if adopts:
            return self._numbered(Step(0, adopts=adopts))
        budget = self._terms.message_budget()
        departing = self._departing(budget)
        acks = self._take_acks({departure.sequence.sequence_id for departure in departing}, budget)
        publishes = self._publishes(departing, budget)
        releases = (*self._releases(departing), *self._forget_kept(budget))
        preempted = self._end_leases(departing)
        # Rows give pages back even if the refused request asks again in this step: the freed pages are for it.
        self._running_pages.begin_step(self._last_step_id + 1, lacks_pages=self._admission.lacks_pages)
        shrinks = self._running_pages.shrinks(budget)
        frees = bool(shrinks) or self._frees(acks, publishes, departing)
        if frees:
            self._admission.freed()
        self._admission.note_branches()
        extends = self._extends(budget)
        inventory = self._restoration.take(budget, self._terms.limits.max_adopt_pages)
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

    def _departing(self, budget: MessageBudget) -> list[Departure]:
        """Returns the leases to end now. A preempted sequence in flight keeps its own until its launch has ended."""
        departures = self._queues.departures
        departing = [
            departure
            for departure in departures.values()
            if not (departure.sequence.in_flight and departure.reason == ReleaseReason.PREEMPTED)
            and budget.take(Release)
        ]
        for departure in departing:
            del departures[departure.sequence.sequence_id]
        return departing

    def _take_acks(self, departing: set[SequenceId], budget: MessageBudget) -> tuple[Ack, ...]:
        """Returns the acks of this step.

        A departing sequence's ack waits for its release, or it would be granted new pages.
        """
        now: list[Ack] = []
        later: list[Ack] = []
        for ack in self._acks:
            sequence = self.tickets.get(ack.ticket)
            is_departing = sequence is not None and sequence.sequence_id in departing
            if is_departing or not budget.take(Ack):
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

    def _publishes(self, departing: list[Departure], budget: MessageBudget) -> tuple[Publish, ...]:
        """Returns publishes, a departing sequence's first: it has no later step."""
        candidates = [d.sequence for d in departing if d.publishes]
        gone = {d.sequence.sequence_id for d in departing}
        candidates += [sequence for sequence in self._queues.leased if sequence.sequence_id not in gone]
        return tuple(publish for sequence in candidates if (publish := self._publish(sequence, budget)) is not None)

    def _publish(self, sequence: Sequence, budget: MessageBudget) -> Publish | None:
        """Publishes filled pages, and the end of the launch that restored a snapshot.

        Until then the snapshot is pinned.
        """
        computed = sequence.computed_len
        fills_page = computed // self._page_tokens > sequence.published_len // self._page_tokens
        if not fills_page and not (sequence.restore and computed > sequence.start_len):
            return None
        tokens = sequence.tokens[sequence.leased_len : computed].tobytes()
        if not budget.take(Publish, ITEM_BYTES + len(tokens)):
            return None
        self._recorder.published(sequence)
        sequence.leased_len = max(sequence.leased_len, computed)
        sequence.published_len = computed
        sequence.restore = ()
        return Publish(sequence.sequence_id, tokens, computed)

    def _releases(self, departing: list[Departure]) -> tuple[Release, ...]:
        releases = []
        for departure in departing:
            rolling_tokens = departure.rolling_tokens(self._page_tokens)
            self._recorder.released(departure.sequence, rolling_tokens)
            releases.append(Release(departure.sequence.sequence_id, departure.reason, rolling_tokens))
        return tuple(releases)

    def _forget_kept(self, budget: MessageBudget) -> tuple[Release, ...]:
        """Returns releases for requests that were aborted while they waited.

        The cache service drops their kept tokens.
        """
        aborted = self._queues.aborted_with_kept_prompt
        waiting = [sequence_id for sequence_id in aborted if not budget.take(Release)]
        self._queues.aborted_with_kept_prompt = waiting
        now = aborted[: len(aborted) - len(waiting)]
        return tuple(Release(sequence_id, ReleaseReason.ABORTED) for sequence_id in now)

    def _end_leases(self, departing: list[Departure]) -> list[Sequence]:
        """Ends these leases. Returns the preempted sequences, which queue again only after this step's acquires."""
        preempted = [d.sequence for d in departing if d.reason == ReleaseReason.PREEMPTED]
        for sequence in preempted:
            sequence.kept_prompt_len = self._admission.keeps(sequence.leased_len)
        for departure in departing:
            self._queues.end_lease(departure.sequence)
            self._forget_tickets(departure.sequence)
        return preempted

    def _forget_tickets(self, sequence: Sequence) -> None:
        for ticket in [ticket for ticket, waiter in self.tickets.items() if waiter is sequence]:
            del self.tickets[ticket]

    # -- what is asked --

    def _extends(self, budget: MessageBudget) -> tuple[Extend, ...]:
        asking = self._running_pages.extends(budget)
        self.asked.update((asked.sequence.sequence_id, asked) for asked in asking)
        return tuple(Extend(asked.sequence.sequence_id, asked.length, asked.sequence.leave_at()) for asked in asking)

    def _acquires(self) -> tuple[Acquire, ...]:
        asking = self._admission.acquires(self._terms.message_budget())
        for sequence, _ in asking:
            length = first_chunk_limit(len(sequence.tokens), self._terms.config)
            self.asked[sequence.sequence_id] = Asked(sequence, Ask.ACQUIRE, length)
            sequence.leased_len = len(sequence.tokens)
        return tuple(acquire for _, acquire in asking)

    def _adopts(self) -> tuple[Adopt, ...]:
        asking = self._adoptions.take(self._terms.message_budget())
        for sequence, _ in asking:
            self.asked[sequence.sequence_id] = Asked(sequence, Ask.ADOPT, sequence.computed_len)
        return tuple(adopt for _, adopt in asking)
