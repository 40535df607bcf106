"""Offers the inventory to a cache service that has lost its state, in slices, beside everything else that a step says.

Pages that nothing branches from but one go together as a run. Runs go out in the order of their last use, oldest
first, each behind its parent run: the service evicts what came first.

The plan is made in slices, too: for 100,000 pages it takes 0.2 s, in which no launch could be started. Steps carry an
empty slice meanwhile. What changes in between has a later stamp, and is passed over when its turn comes.

A step is built when every earlier reply was applied, and the service applies its inventory before it grants anything of
it. So no page that is offered was granted in between, and what is granted before its turn comes is known no more.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from session.messages import CachedRun
from session.messages import Inventory as Slice
from session.words import NO_PAGE, PAGE_ID_BYTES, TOKEN_BYTES, GroupKind, GroupSpec
from worker_service.core.inventory import Inventory
from worker_service.core.inventory_recorder import Recorder
from worker_service.core.limits import ITEM_BYTES, MessageBudget, name_bytes

# Pages that are chained, or put into runs, with one step while the plan is made: 2 to 4 ms. Finding and sorting them
# takes less, so of these looks at a page LOOKS count as one: about 3 ms at most.
PLANNED_PAGES = 4096
LOOKS = 3
PART = PLANNED_PAGES // 4  # looked at between two yields
SAMPLED = 64  # every 64th item is sampled to choose the bounds of the buckets that are sorted

_T = TypeVar("_T")


class PageRecords(NamedTuple):
    """What is known of pages, and what of it is still to be offered."""

    recorder: Recorder
    restoration: Restoration


@dataclass(eq=False, slots=True)
class _Run:
    """`number` is that of its last piece; 0: none was sent, or not all of them."""

    parent: _Run | None
    page_ids: array[int]  # of the leading group
    last_used: int = 0
    is_planned: bool = False
    num_sent: int = 0
    number: int = 0


class Restoration:
    def __init__(self, inventory: Inventory, groups: tuple[GroupSpec, ...]) -> None:
        self._inventory = inventory
        self._groups = groups
        self._whole = [group for group in inventory.leads if groups[group].kind is GroupKind.FULL]
        self._plan: Iterator[int] | None = None  # while it is being made
        self._runs: Iterator[_Run] | None = None  # once it is made
        self._run: _Run | None = None  # of which pieces are still to be sent
        self._horizon = 0
        self._last_number = 0
        self._page_of: dict[int, array[int]] = {}  # of the other groups, by the leading group's page

    @property
    def is_pending(self) -> bool:
        return self._plan is not None or self._runs is not None

    def begin(self) -> None:
        """Begins to offer all that is known: the service has a new state, which knows no page."""
        self.end()
        if self._inventory.leading is not None and self._inventory.num_pages:
            self._horizon, self._last_number = self._inventory.clock, 0
            self._plan = self._make_plan()

    def end(self) -> None:
        """Offers nothing more."""
        self._plan = self._runs = self._run = None
        self._page_of = {}

    def take(self, budget: MessageBudget, max_pages: int) -> Slice | None:
        """Returns what goes with the next step, at most `max_pages` of all groups together; None: nothing."""
        if self._plan is not None and not self._go_on_planning(self._plan):
            return Slice((), is_complete=False)
        if self._runs is None:
            return None
        pieces: list[CachedRun] = []
        pages_left = max_pages // len(self._groups)
        # Limits that no page fits into: nothing is ever sent.
        while max_pages >= len(self._groups) and self._next_run():
            assert self._run is not None
            piece = self._piece(self._run, budget, pages_left)
            if piece is None:
                return Slice(tuple(pieces), is_complete=False) if pieces else None
            pages_left -= len(piece.page_ids[0]) // PAGE_ID_BYTES
            pieces.append(piece)
        self.end()
        return Slice(tuple(pieces), is_complete=True)

    # -- what to send --

    def _next_run(self) -> bool:
        """Returns whether `_run` has something to send; passes over runs whose parent was not sent whole."""
        assert self._runs is not None
        while self._run is None or self._run.num_sent == len(self._run.page_ids) or not self._is_alive(self._run):
            if self._run is not None and self._run.num_sent < len(self._run.page_ids):
                self._run.number = 0
            self._run = next(self._runs, None)
            if self._run is None:
                return False
        return True

    def _is_alive(self, run: _Run) -> bool:
        """Returns whether the run's next page is unchanged, behind a page that was sent."""
        if run.parent is not None and not run.parent.number:
            return False
        return self._is_as_planned(run.page_ids[run.num_sent])

    def _is_as_planned(self, page_id: int) -> bool:
        inventory = self._inventory
        parent = inventory.parents[page_id]
        stamp = inventory.stamps[page_id]
        is_same = 0 < stamp <= self._horizon and (
            not parent or inventory.stamps[parent] == inventory.parent_stamps[page_id]
        )
        return is_same and all(self._page_at(group, page_id) for group in self._whole)

    def _page_at(self, group: int, lead: int) -> int:
        """Returns the group's page at the place of this page of the leading group; NO_PAGE where nothing is known."""
        inventory, page_id = self._inventory, self._page_of[group][lead]
        is_there = page_id and inventory.leads[group][page_id] == lead
        return page_id if is_there and inventory.lead_stamps[group][page_id] == inventory.stamps[lead] else NO_PAGE

    def _piece(self, run: _Run, budget: MessageBudget, max_pages: int) -> CachedRun | None:
        """Returns the run's next pages, as many as fit; None where not one does."""
        inventory, first = self._inventory, run.num_sent
        is_start = run.parent is None and not first
        namespace = inventory.namespace(run.page_ids[first]) if is_start else None
        page_bytes = TOKEN_BYTES * inventory.page_tokens + PAGE_ID_BYTES * len(self._groups)
        fixed = ITEM_BYTES * (1 + len(self._groups)) + (name_bytes(namespace) if namespace is not None else 0)
        num_pages = min(max_pages, (budget.num_bytes - fixed) // page_bytes)
        if num_pages < 1 or not budget.take(CachedRun, fixed + page_bytes):
            return None
        sent = array("I", run.page_ids[first : first + 1])
        for page_id in run.page_ids[first + 1 : first + num_pages]:
            if not self._is_as_planned(page_id) or not budget.take_bytes(page_bytes):
                break
            sent.append(page_id)
        above = run.number if first else run.parent.number if run.parent is not None else 0
        self._last_number += 1
        run.number, run.num_sent = self._last_number, first + len(sent)
        tokens = b"".join(inventory.page(page_id).tobytes() for page_id in sent)
        page_ids = tuple(self._ids_of(group, sent) for group in range(len(self._groups)))
        return CachedRun(run.number, above, namespace, tokens, page_ids)

    def _ids_of(self, group: int, leading: array[int]) -> bytes:
        """Returns the group's pages at the places of these, with holes where nothing is known."""
        if group == self._inventory.leading:
            return leading.tobytes()
        return array("I", [self._page_at(group, lead) for lead in leading]).tobytes()

    # -- the plan --

    def _go_on_planning(self, plan: Iterator[int]) -> bool:
        """Does one step's part of the work. Returns whether the plan is made."""
        num_pages = 0
        for seen in plan:
            num_pages += seen
            if num_pages >= PLANNED_PAGES:
                return False
        return True

    def _make_plan(self) -> Iterator[int]:
        """Sets `_runs`. Yields after each part of the work how many pages it looked at; see PLANNED_PAGES."""
        stamps = self._inventory.stamps
        for group in self._inventory.leads:
            self._page_of[group] = yield from self._pages_by_lead(group)
        known: list[int] = []
        for part in _parts(range(len(stamps))):
            known += [page_id for page_id in part if stamps[page_id]]
            yield len(part) // LOOKS
        known = yield from _in_order(known, stamps.__getitem__)
        num_children = array("I", bytes(4 * len(stamps)))
        chained: list[int] = []
        reached = bytearray(len(stamps))
        for part in _parts(known):
            chained += self._chained(part, reached, num_children)
            yield len(part)
        runs: list[_Run] = []
        run_of: dict[int, _Run] = {}  # by the last page so far
        for part in _parts(chained):
            self._join(part, num_children, run_of, runs)
            yield len(part)
        runs = yield from _oldest_first(runs)
        self._runs, self._plan = iter(runs), None

    def _pages_by_lead(self, group: int) -> Generator[int, None, array[int]]:
        inventory = self._inventory
        page_of = array("I", bytes(PAGE_ID_BYTES * len(inventory.stamps)))
        leads, lead_stamps, stamps = inventory.leads[group], inventory.lead_stamps[group], inventory.stamps
        for part in _parts(range(len(lead_stamps))):
            for page_id in part:
                stamp = lead_stamps[page_id]
                if stamp and stamps[leads[page_id]] == stamp:
                    page_of[leads[page_id]] = page_id
            yield len(part) // LOOKS
        return page_of

    def _chained(self, known: Sequence[int], reached: bytearray, num_children: array[int]) -> list[int]:
        """Returns the pages whose chain is known from its start. A page is recorded after the one before it, so these
        come in order; `reached` and `num_children` are of all pages so far."""
        stamps, parents, parent_stamps = self._inventory.stamps, self._inventory.parents, self._inventory.parent_stamps
        chained = []
        for page_id in known:
            parent = parents[page_id]
            if parent and not (reached[parent] and stamps[parent] == parent_stamps[page_id]):
                continue
            if all(self._page_of[group][page_id] for group in self._whole):
                reached[page_id] = 1
                num_children[parent] += 1
                chained.append(page_id)
        return chained

    def _join(
        self, chained: Sequence[int], num_children: array[int], run_of: dict[int, _Run], runs: list[_Run]
    ) -> None:
        """Puts a page that is the only child of another one into its run; adds new runs to `runs`, parents first."""
        parents, used = self._inventory.parents, self._inventory.used
        for page_id in chained:
            parent = parents[page_id]
            run = run_of.get(parent) if parent else None
            if run is None or num_children[parent] > 1:
                run = _Run(run, array("I"))
                runs.append(run)
            else:
                del run_of[parent]
            run.page_ids.append(page_id)
            run.last_used = max(run.last_used, used[page_id])
            run_of[page_id] = run


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    return (items[first : first + PART] for first in range(0, len(items), PART))


def _in_order(items: list[_T], key: Callable[[_T], int]) -> Generator[int, None, list[_T]]:
    """Returns what `sorted` does, which would sort all in one piece: bounds from a sample divide the items into buckets
    of about a part each, and these are sorted one by one."""
    bounds = sorted(map(key, items[::SAMPLED]))[PART // SAMPLED :: PART // SAMPLED]
    buckets: list[list[_T]] = [[] for _ in range(len(bounds) + 1)]
    for part in _parts(items):
        for item in part:
            buckets[bisect_right(bounds, key(item))].append(item)
        yield len(part) // LOOKS
    ordered: list[_T] = []
    for bucket in buckets:
        ordered += sorted(bucket, key=key)
        yield len(bucket) // LOOKS
    return ordered


def _oldest_first(runs: list[_Run]) -> Generator[int, None, list[_Run]]:
    """Returns the runs in the order of their last use, each behind its parent: leaves are evicted first."""
    ordered: list[_Run] = []
    by_use = yield from _in_order(runs, lambda run: run.last_used)
    for run in by_use:
        above: list[_Run] = []
        step: _Run | None = run
        while step is not None and not step.is_planned:
            step.is_planned = True
            above.append(step)
            step = step.parent
        ordered += reversed(above)
        yield 1 + len(above)
    return ordered
