"""The connector in the scheduler's process: it asks the tier, and tells the workers what to read, stage and write.

It knows vLLM's objects by the few attributes that it reads, and imports neither vLLM nor torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

from adapters.vllm.layout import Layout
from adapters.vllm.lookups import MAX_PAGES, Lookups, Request, namespace
from adapters.vllm.metadata import BlockPages, LoadOrder, LoadReport, StepOrders, StepReports, WriteReport
from adapters.vllm.saving import NULL_BLOCK, BoundaryState, Completed, Cursor, Save, make_batch, state_table
from session.words import GroupKind, TransferStatus
from tier_client.calls import HostTierCalls
from tier_client.values import Hit, KeyedPages

# Saves that wait for the tier or for the store; more are not begun.
MAX_OPEN_SAVES = 64
# After this a save is given up: its ticket ends, and the engine is not kept stepping for it.
SAVE_S = 30.0


class Scheduled(NamedTuple):
    """One request of a step: it computes tokens `computed` .. `end` - 1 with these block tables, one for each group.

    `states`: the recurrent states that the step leaves for good.
    """

    request_id: str
    computed: int
    end: int
    tables: Sequence[Sequence[int]]
    states: Sequence[BoundaryState] = ()


@dataclass(slots=True)
class Loading:
    request_id: str
    hit: Hit
    num_pages: int
    reports: list[LoadReport] = field(default_factory=list)


class SchedulerSide:
    """`thread` runs the tier's calls one after the other; `saves` and `loads` say what the engine's role allows."""

    def __init__(
        self,
        index: HostTierCalls,
        thread: Executor,
        layout: Layout,
        num_ranks: int,
        *,
        timeout_s: float,
        inline_wait_s: float,
        pause_s: float,
        loads: bool = True,
        saves: bool = True,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index, self._thread, self._layout, self._num_ranks = index, thread, layout, num_ranks
        self._loads, self._saves, self._now_s = loads, saves, now_s
        self._pause_s, self._store_asked_from_s = pause_s, now_s()
        self._lookups = Lookups(index, thread, layout.page_tokens, timeout_s, inline_wait_s, now_s)
        self._requests: dict[str, Request] = {}
        self._cursors: dict[str, Cursor] = {}
        self._failed: set[str] = set()
        self._loading: dict[int, Loading] = {}
        self._saving: dict[int, Save] = {}
        self._last_number = 0
        self._orders = StepOrders()

    # Loads.

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """Returns how many tokens behind `computed` can be loaded; None: the tier has not replied yet."""
        self._requests[request.request_id] = request
        # A load that failed once is not tried again: the store may go on failing for as long as it is asked.
        if not self._loads or request.skip_reading_prefix_cache or request.request_id in self._failed:
            return 0
        if self._now_s() < self._store_asked_from_s:
            self._lookups.drop(request.request_id)
            return 0
        return self._lookups.tokens(request, computed // self._layout.page_tokens)

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], num_loaded_tokens: int) -> None:
        """Orders the load of `num_loaded_tokens` of what `matched_tokens` offered: blocks were found for the
        request."""
        if not num_loaded_tokens:
            self._lookups.drop(request.request_id)
            return
        taken = self._lookups.take(request.request_id)
        local_pages, found = taken or (0, Hit(0))
        num_pages = num_loaded_tokens // self._layout.page_tokens
        self._last_number += 1
        is_as_offered = found.usable_pages - local_pages == num_pages
        groups = tuple(self._load_group(pages, tables) for pages in found.pages) if is_as_offered else ()
        # Loads that vLLM changed have no pages here, which the workers report as failed. Each group reads the last one.
        if not all(found.usable_pages - 1 in one.pages.pages for one in groups):
            groups = ()
        order = LoadOrder(self._last_number, request.request_id, local_pages, local_pages + num_pages, groups)
        self._loading[order.number] = Loading(request.request_id, found, num_pages)
        self._orders.loads.append(order)
        self._orders.overwritten.update(block for table in tables for block in table)

    def _load_group(self, pages: KeyedPages, tables: Sequence[Sequence[int]]) -> BlockPages:
        """A page of a window that vLLM has no block for is one that it does not read."""
        table = tables[pages.group]
        held = [
            (page, page_hash, table[page])
            for page, page_hash in zip(pages.pages, pages.page_hashes, strict=True)
            if page < len(table) and table[page] != NULL_BLOCK
        ]
        numbers, hashes, blocks = zip(*held, strict=True) if held else ((), (), ())
        return BlockPages(pages._replace(pages=numbers, page_hashes=hashes), blocks)

    # Steps.

    def step(self, scheduled: Iterable[Scheduled], new_blocks: Iterable[int]) -> StepOrders:
        """Returns the orders for the workers in this step. `new_blocks`: what this step writes anew, or more."""
        orders, self._orders = self._orders, StepOrders()
        orders.overwritten.update(new_blocks)
        orders.overwritten.discard(NULL_BLOCK)
        if self._saves:
            self._order_writes(orders)
            self._stage(scheduled, orders)
        return orders

    def _stage(self, scheduled: Iterable[Scheduled], orders: StepOrders) -> None:
        completed: dict[tuple[str, str], list[Completed]] = {}
        for one in scheduled:
            request = self._requests.get(one.request_id)
            if request is not None:
                first_page = one.computed // self._layout.page_tokens
                cursor = self._cursors.setdefault(one.request_id, Cursor(first_page))
                ids = request.block_hashes
                pages = cursor.advance(ids, self._saved_tables(one), one.computed, one.end, self._layout.page_tokens)
                if pages:
                    completed.setdefault(namespace(request), []).extend(pages)
        for (adapter, salt), found in completed.items():
            if len(self._saving) >= MAX_OPEN_SAVES or self._index.is_away() or self._now_s() < self._store_asked_from_s:
                return
            self._begin(adapter, salt, found, orders)

    def _saved_tables(self, one: Scheduled) -> list[Sequence[int]]:
        return [
            state_table(one.states, number, self._layout.page_tokens) if group.kind is GroupKind.STATE else table
            for number, (group, table) in enumerate(zip(self._layout.groups, one.tables, strict=True))
        ]

    def _begin(self, adapter: str, salt: str, completed: list[Completed], orders: StepOrders) -> None:
        batch = make_batch(adapter, salt, completed, len(self._layout.groups), MAX_PAGES)
        self._last_number += 1
        asked = self._thread.submit(self._index.reserve, batch.path, batch.ranges())
        save = Save(self._last_number, batch.path, batch.staged, asked, self._now_s() + SAVE_S)
        self._saving[save.number] = save
        orders.stages.append(batch.stage_order(save.number))

    def _order_writes(self, orders: StepOrders) -> None:
        """Adds write orders for the saves that the tier has replied to since the last step."""
        for save in list(self._saving.values()):
            if save.ticket is None and save.asked.done():
                failed = save.asked.cancelled() or save.asked.exception() is not None
                ticket = None if failed else save.asked.result()
                if ticket is not None and ticket.number:
                    orders.writes.append(save.write_order(ticket))
                else:
                    self._close(save, orders)
        self._give_up_late(orders)

    def _give_up_late(self, orders: StepOrders) -> None:
        for save in [save for save in self._saving.values() if self._now_s() >= save.until_s]:
            self._close(save, orders)
            self._thread.submit(self._end_ticket, save)

    def _end_ticket(self, save: Save) -> None:
        """Ends a save's ticket, so that others may write its pages. Runs behind the save's Reserve call."""
        ticket = None if save.asked.cancelled() or save.asked.exception() is not None else save.asked.result()
        if ticket is not None and ticket.number:
            for rank in [rank for rank in range(self._num_ranks) if rank not in save.reported]:
                self._index.commit(ticket, rank, (), TransferStatus.DONE)

    def _close(self, save: Save, orders: StepOrders) -> None:
        del self._saving[save.number]
        orders.drops.append(save.number)

    # Reports of the workers.

    def reported(self, reports: StepReports) -> None:
        statuses = {load.status for load in reports.loads} | {write.status for write in reports.writes}
        if TransferStatus.FAILED in statuses:
            # The workers do not ask it meanwhile either: what is granted now would only fail.
            self._store_asked_from_s = self._now_s() + self._pause_s
        for load in reports.loads:
            self._load_reported(load)
        for write in reports.writes:
            self._write_reported(write)

    def _load_reported(self, report: LoadReport) -> None:
        loading = self._loading.get(report.number)
        if loading is None:
            return
        loading.reports.append(report)
        self._index.was_read(report.num_bytes, report.took_s)
        if len(loading.reports) < self._num_ranks:
            return
        del self._loading[report.number]
        # The rank that got least says why.
        worst = min(loading.reports, key=lambda each: (each.num_pages, each.status is TransferStatus.DONE))
        if worst.num_pages < loading.num_pages and loading.request_id in self._requests:
            self._failed.add(loading.request_id)
        self._lookups.release(loading.hit, worst.num_pages, worst.status)

    def _write_reported(self, report: WriteReport) -> None:
        save = self._saving.get(report.number)
        if save is None or save.ticket is None or report.rank in save.reported:
            return
        save.reported[report.rank] = report
        self._thread.submit(self._index.commit, save.ticket, report.rank, report.written, report.status)
        if len(save.reported) == self._num_ranks:
            del self._saving[report.number]

    def finished(self, request_id: str) -> None:
        """Forgets a request. Its blocks may be freed at once: what is to be saved is staged before it is
        overwritten."""
        self._lookups.drop(request_id)
        self._requests.pop(request_id, None)
        self._cursors.pop(request_id, None)
        self._failed.discard(request_id)

    def has_open_saves(self) -> bool:
        """Returns whether saves are open, for which later steps have orders or reports. Gives up what took too long."""
        self._give_up_late(self._orders)
        return bool(self._saving)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._index.close()
