"""Pages that rows take by themselves while the cache service does not reply.

The worker has given up the service's state by then (Readmitter.detach), and its transfers have ended: nobody else may
name a page before the next Welcome. So a row that lacks pages gets pages that no live sequence reads or writes: first
those of which nothing is known, then the ends of the cached prompts that were used least recently. The inventory
forgets what they held. The next Hello begins a new state of the service, which adopts the sequences with these pages in
their block tables, and then learns what the inventory still has.

    of the leading group   a page that no known page follows, oldest use first; then the page before it, and so on
    of another FULL group  the page beside it, in the same order: a prompt that lacks its first page is lost whole
    of a WINDOW group      by the last use of the leading group's page at the same place

Slots of STATE groups are not taken: rows go on in those that they hold, and leave no snapshots meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain

from session.words import NO_PAGE, GroupKind, ReleaseReason
from worker_service.core.inventory import Inventory
from worker_service.core.inventory_recorder import Recorder
from worker_service.core.launch_plan import Plan, decode_need, plan_launch
from worker_service.core.limits import Terms
from worker_service.core.prediction import Prediction
from worker_service.core.queues import Queues
from worker_service.core.sequence import Sequence

# A look through 60,000 pages takes 15 ms. After one that found none, this many calls of `take` pass without one: at
# first, and at most.
FEW_CALLS, MANY_CALLS = 8, 64
# Cached pages of a window that are taken before the next look: streams leave others behind meanwhile.
NUM_OLDEST = 16
# Of a page: 0 is spare.
IN_USE, LEFT_BEHIND = 1, 2


class OwnPages:
    def __init__(
        self, terms: Terms, queues: Queues, prediction: Prediction, recorder: Recorder, inventory: Inventory
    ) -> None:
        self._terms = terms
        self._queues = queues
        self._prediction = prediction
        self._recorder = recorder
        self._inventory = inventory
        self._spare: dict[int, Iterator[int]] = {}  # by group, the next one first
        self._returned: dict[int, list[int]] = {}  # taken off `_spare` and not used
        self._pauses: dict[int, int] = {}  # calls until a group without spare pages is looked through again
        self._last_pauses: dict[int, int] = {}

    def begin(self) -> None:
        """Starts over: the worker has just given up the state of the cache service."""
        for pages in (self._spare, self._returned, self._pauses, self._last_pauses):
            pages.clear()

    def decode_lacks_pages(self) -> bool:
        """Returns whether a row that decodes has no page for its next token."""
        plan = self._plan()
        return any(self._lack(plan, index) for index in range(plan.num_decode))

    def take(self) -> int:
        """Gives pages to rows that lack them for the next launch. Returns how many it gave, of all groups together."""
        self._end_leases()
        self._pauses = {group: calls - 1 for group, calls in self._pauses.items() if calls > 1}
        plan = self._plan()
        lacking = [(row.sequence, lack) for index, row in enumerate(plan.rows) if (lack := self._lack(plan, index))]
        return sum([self._give(sequence, length) for sequence, length in lacking])

    def _plan(self) -> Plan:
        progress, num_waiting = self._prediction.progress(), len(self._queues.waiting)
        return plan_launch(progress, self._terms.config, within_pages=False, num_waiting=num_waiting)

    def _lack(self, plan: Plan, index: int) -> int:
        """Returns the length in tokens that a row needs pages for; 0 where it has them."""
        sequence, first, num_tokens = plan.rows[index]
        need = decode_need(first, self._terms.config) if index < plan.num_decode else first + num_tokens
        return need if need > self._prediction.allocated_len(sequence) else 0

    def _give(self, sequence: Sequence, length: int) -> int:
        """Appends pages for `length` tokens to every block table. Returns how many; 0 where some group lacks them."""
        groups = self._terms.config.paged_groups
        num_pages = -(-length // self._terms.config.page_tokens)
        lacking = {group: max(num_pages - len(sequence.tables[group]), 0) for group in groups}
        taken = {group: self._next_pages(group, lacking[group]) for group in groups}
        if any(len(taken[group]) < lacking[group] for group in groups):
            for group, page_ids in taken.items():
                self._returned.setdefault(group, []).extend(page_ids)
            return 0
        for group, page_ids in taken.items():
            self._inventory.forget_pages(group, page_ids)
            sequence.tables[group].extend(page_ids)
        sequence.granted_len = max(sequence.granted_len, length)
        sequence.num_refused_extends = 0
        return sum(lacking.values())

    def _next_pages(self, group: int, num_pages: int) -> list[int]:
        """Returns spare pages of a group, fewer than asked for where there are no more."""
        returned = self._returned.setdefault(group, [])
        found, returned[:] = returned[:num_pages], returned[num_pages:]
        while len(found) < num_pages:
            page_id = next(self._spare.get(group, iter(())), 0)
            if page_id:
                found.append(page_id)
            elif not self._look_again(group, found):
                break
        return found

    def _look_again(self, group: int, found: list[int]) -> bool:
        """Looks through all pages of a group for spare ones. Returns whether there are any; False also for some calls
        after one that found none."""
        if group in self._pauses:
            return False
        # Before pages that windows have left behind are written.
        self._recorder.computed(self._queues.undoubted())
        use = self._use_of(group)
        for page_id in found:
            use[page_id] = IN_USE
        if 0 in use or LEFT_BEHIND in use:
            self._spare[group] = self._in_order(group, use)
            self._last_pauses.pop(group, None)
            return True
        self._pauses[group] = self._last_pauses[group] = min(
            2 * self._last_pauses.get(group, FEW_CALLS // 2), MANY_CALLS
        )
        return False

    # -- what is in use, and what is known --

    def _use_of(self, group: int) -> bytearray:
        """Returns for each page whether launches to come read or write it, or a window has left it behind."""
        config = self._terms.config
        spec = config.groups[group]
        use = bytearray(spec.num_pages + 1)
        read: list[array[int]] = [array("i", (NO_PAGE,))]
        for sequence in self._queues.leased:
            num_left = 0
            if spec.kind is GroupKind.WINDOW:
                num_left = max(sequence.computed_len - (spec.window_tokens - 1), 0) // config.page_tokens
            table = sequence.tables[group]
            read.append(table[num_left:])
            for page_id in table[:num_left]:
                use[page_id] = LEFT_BEHIND
        # Last: what one sequence left behind another one may still read.
        for page_id in chain.from_iterable(read):
            use[page_id] = IN_USE
        return use

    def _end_leases(self) -> None:
        """Ends the leases of requests that are over; preempted ones keep theirs until they are adopted or queue."""
        for sequence_id, departure in list(self._queues.departures.items()):
            if departure.reason is not ReleaseReason.PREEMPTED:
                if departure.publishes:
                    self._recorder.published(departure.sequence)
                rolling_tokens = departure.rolling_tokens(self._terms.config.page_tokens)
                self._recorder.released(departure.sequence, rolling_tokens)
                self._recorder.record_unanswered()
                del self._queues.departures[sequence_id]
                self._queues.end_lease(departure.sequence)

    # -- the order --

    def _in_order(self, group: int, use: bytearray) -> Iterator[int]:
        if group == self._inventory.leading:
            return self._by_chains(use)
        is_full = self._terms.config.groups[group].kind is GroupKind.FULL
        return self._beside_leading(group, use) if is_full else iter(self._by_last_use(group, use))

    def _by_chains(self, use: bytearray) -> Iterator[int]:
        """Yields pages of the leading group: unknown ones, then known chains from their ends, oldest use first.

        Links are those of the look: other FULL groups follow this order when the leading group's pages are forgotten.
        """
        inventory = self._inventory
        stamps, parent_stamps = inventory.stamps, inventory.parent_stamps
        spare = [page_id for page_id, in_use in enumerate(use) if not in_use]
        known = [page_id for page_id in spare if stamps[page_id]]
        # Pages in use are no children: a page that only they follow may be taken, or it never would be.
        num_children = [0] * len(stamps)
        parents: list[int] = [NO_PAGE] * len(stamps)
        for page_id in known:
            parent = inventory.parents[page_id]
            if parent_stamps[page_id] == stamps[parent]:
                parents[page_id] = parent
                num_children[parent] += 1
        ends = [(inventory.used[page_id], page_id) for page_id in known if not num_children[page_id]]
        unknown = [page_id for page_id in spare if not stamps[page_id]]
        return chain(unknown, self._from_ends(ends, parents, num_children, use))

    def _from_ends(
        self, ends: list[tuple[int, int]], parents: list[int], num_children: list[int], use: bytearray
    ) -> Iterator[int]:
        used = self._inventory.used
        heapify(ends)
        while ends:
            _, page_id = heappop(ends)
            parent = parents[page_id]
            yield page_id
            if parent != NO_PAGE:
                num_children[parent] -= 1
                if not num_children[parent] and not use[parent]:
                    heappush(ends, (used[parent], parent))

    def _beside_leading(self, group: int, use: bytearray) -> Iterator[int]:
        """Yields pages of another FULL group: those that stand beside no spare page of the leading group, so that no
        prompt needs them, then the others in the order in which the leading group's are taken."""
        leading, stamps = self._inventory.leading, self._inventory.stamps
        assert leading is not None
        leading_use = self._use_of(leading)
        beside: list[int] = [NO_PAGE] * len(leading_use)  # by the leading group's page
        needless = []
        links = zip(use, self._inventory.leads[group], self._inventory.lead_stamps[group], strict=True)
        for page_id, (in_use, lead, stamp) in enumerate(links):
            if in_use:
                continue
            if stamp and stamps[lead] == stamp and not leading_use[lead] and not beside[lead]:
                beside[lead] = page_id
            else:
                needless.append(page_id)
        return chain(needless, (beside[lead] for lead in self._by_chains(leading_use) if beside[lead]))

    def _by_last_use(self, group: int, use: bytearray) -> list[int]:
        """Returns pages of a WINDOW group: what windows left behind and what belongs to no known page; where there are
        none, a few by the last use of the page that they belong to."""
        inventory, size = self._inventory, len(use)
        last_use = [0] * size
        if inventory.leading is not None:
            stamps, used = inventory.stamps, inventory.used
            links = zip(inventory.leads[group], inventory.lead_stamps[group], strict=True)
            last_use = [used[lead] if stamp and stamps[lead] == stamp else 0 for lead, stamp in links]
        spare = [page_id for page_id in range(size) if use[page_id] != IN_USE]
        lost = [page_id for page_id in spare if use[page_id] == LEFT_BEHIND or not last_use[page_id]]
        return lost or sorted(spare, key=last_use.__getitem__)[:NUM_OLDEST]
