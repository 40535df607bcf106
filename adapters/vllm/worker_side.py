"""The connector in a worker: reads pages into blocks, stages and writes them, all beside the forward pass."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from adapters.vllm.layout import Layout
from adapters.vllm.metadata import (
    BlockPages,
    LoadOrder,
    LoadReport,
    StageOrder,
    StepOrders,
    StepReports,
    WriteOrder,
    WriteReport,
)
from adapters.vllm.page_copies import Event, PageCopies
from session.words import TransferStatus
from tier_client.page_store import PageStore
from tier_client.values import KeyedPages

# Pages of one read or write, in bytes: what a thread holds in host memory at a time.
BATCH_BYTES = 16 << 20


_log = logging.getLogger(f"vllm.{__name__}")


class Results(NamedTuple):
    """Loads that have ended since the last step. `failed` ones are among `finished`."""

    finished: set[str]
    failed: set[str]
    bad_blocks: set[int]


@dataclass(slots=True)
class Staged:
    """Bytes of pages by group, when they are there, and the blocks that the copies read."""

    pages: dict[int, torch.Tensor]
    copies: list[Event]
    blocks: set[int]
    num_bytes: int


class WorkerSide:
    """One rank. vLLM's thread calls it; threads of its own read and write the store."""

    def __init__(
        self,
        store: PageStore,
        copies: PageCopies,
        layout: Layout,
        rank: int,
        *,
        max_staged_bytes: int,
        load_threads: int,
        save_threads: int,
    ) -> None:
        self._store, self._copies, self._layout, self._rank = store, copies, layout, rank
        self._max_staged_bytes = max_staged_bytes
        self._load_threads = ThreadPoolExecutor(load_threads, thread_name_prefix="stemcache-load")
        self._save_threads = ThreadPoolExecutor(save_threads, thread_name_prefix="stemcache-save")
        self._lock = threading.Lock()
        self._staged: dict[int, Staged] = {}
        self._staged_bytes = 0
        self._results = Results(set(), set(), set())
        self._reports = StepReports()

    # In a step, in this order.

    def before_forward(self, orders: StepOrders) -> None:
        """Copies that read a block come before whatever this step writes there: the block is another request's now."""
        with self._lock:
            reading = [staged for staged in self._staged.values() if not staged.blocks.isdisjoint(orders.overwritten)]
        for staged in reading:
            self._copies.hold_back_forward(staged.copies)

    def start_loads(self, orders: StepOrders) -> None:
        if orders.loads:
            after = self._copies.forward_event()
            for order in orders.loads:
                self._load_threads.submit(self._load, order, after)

    def after_forward(self, orders: StepOrders) -> None:
        """Stages what this step has completed, and begins to write what was staged before."""
        for number in orders.drops:
            self._forget(number)
        if orders.stages:
            after = self._copies.forward_event()
            for stage in orders.stages:
                self._stage(stage, after)
        for write in orders.writes:
            self._save_threads.submit(self._write, write)

    def take_results(self) -> Results:
        with self._lock:
            results, self._results = self._results, Results(set(), set(), set())
        return results

    def take_reports(self) -> StepReports:
        with self._lock:
            reports, self._reports = self._reports, StepReports()
        return reports

    def close(self) -> None:
        self._load_threads.shutdown(wait=False, cancel_futures=True)
        self._save_threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    # Loads.

    def _load(self, order: LoadOrder, after: Event) -> None:
        """Loads pages. Never raises: a load without a result would keep its request waiting for ever."""
        start_s = time.monotonic()
        try:
            end, status = self._read(order, after)
        except Exception:
            _log.exception("a load failed")
            end, status = order.first_page, TransferStatus.FAILED
        is_failed = end < order.end_page
        num_bytes = 0 if is_failed else sum(len(one.blocks) * self._page_bytes(one.pages.group) for one in order.groups)
        took_s = time.monotonic() - start_s
        with self._lock:
            self._results.finished.add(order.request_id)
            if is_failed and self._layout.is_one_full_group and order.groups:
                first = order.groups[0].pages.pages.index(end)
                self._results.bad_blocks.update(order.groups[0].blocks[first:])
            elif is_failed:
                self._results.failed.add(order.request_id)
            num_pages = end - order.first_page
            self._reports.loads.append(LoadReport(order.number, self._rank, status, num_pages, num_bytes, took_s))

    def _read(self, order: LoadOrder, after: Event) -> tuple[int, TransferStatus]:
        """Returns up to which page every group was read, and what was wrong with the next one."""
        if not order.groups:
            return order.first_page, TransferStatus.DONE
        for one in order.groups:
            num_read, status = self._read_group(one, after)
            if num_read < len(one.blocks):
                # Pages of other groups behind it are of no use.
                return one.pages.pages[num_read], status
        return order.end_page, TransferStatus.DONE

    def _read_group(self, one: BlockPages, after: Event) -> tuple[int, TransferStatus]:
        group, keys, page_bytes = one.pages.group, one.pages.keys(self._rank), self._page_bytes(one.pages.group)
        step = max(1, BATCH_BYTES // page_bytes)
        for first in range(0, len(keys), step):
            batch = keys[first : first + step]
            found = self._store.read(group, batch, page_bytes)
            if any(page.nbytes != page_bytes for page in found.values):
                raise ValueError(f"a page of group {group} has not {page_bytes} bytes")
            if found.values:
                buffer = self._copies.host_buffer(group, len(found.values))
                for row, page in zip(buffer, found.values, strict=True):
                    row.copy_(torch.frombuffer(page, dtype=torch.uint8))
                self._copies.place(group, one.blocks[first : first + len(found.values)], buffer, after)
            if len(found.values) < len(batch):
                return first + len(found.values), found.status
        return len(keys), TransferStatus.DONE

    # Saves.

    def _stage(self, order: StageOrder, after: Event) -> None:
        num_bytes = sum(len(blocks) * self._page_bytes(group) for group, blocks in order.blocks)
        with self._lock:
            if self._staged_bytes + num_bytes > self._max_staged_bytes:
                return
            self._staged_bytes += num_bytes
        staged = Staged({}, [], set(), num_bytes)
        try:
            for group, blocks in order.blocks:
                staged.pages[group], copied = self._copies.stage(group, blocks, after)
                staged.copies.append(copied)
                staged.blocks.update(blocks)
        except (RuntimeError, MemoryError) as error:
            # No host memory to pin, say: pages that are not saved are a miss later, and no reason to end the engine.
            _log.warning("pages are not saved: %s", error)
            with self._lock:
                self._staged_bytes -= num_bytes
            return
        with self._lock:
            self._staged[order.number] = staged

    def _write(self, order: WriteOrder) -> None:
        """Writes and reports, also where nothing is staged any more: the ticket ends with the report."""
        written: list[tuple[int, int]] = []
        status = TransferStatus.DONE
        try:
            with self._lock:
                staged = self._staged.get(order.number)
            if staged is not None:
                for copied in staged.copies:
                    copied.wait()
                for pages, rows in order.groups:
                    if pages.replicated and self._rank:
                        continue  # rank 0 writes them for all
                    count, status = self._write_pages(pages, staged.pages[pages.group], rows)
                    written.append((pages.group, count))
                    if count < len(rows):
                        break
        except Exception:
            _log.exception("a save failed")
            status = TransferStatus.FAILED
        self._forget(order.number)
        with self._lock:
            self._reports.writes.append(WriteReport(order.number, self._rank, status, tuple(written)))

    def _write_pages(self, pages: KeyedPages, staged: torch.Tensor, rows: Sequence[int]) -> tuple[int, TransferStatus]:
        """Returns how many of the first pages are stored, and FAILED where the store did not answer."""
        keys = pages.keys(self._rank)
        step = max(1, BATCH_BYTES // staged.shape[1])
        for first in range(0, len(keys), step):
            batch = [staged[row].numpy().data for row in rows[first : first + step]]
            stored, status = self._store.write(pages.group, keys[first : first + step], batch)
            if stored < len(batch):
                return first + stored, status
        return len(keys), TransferStatus.DONE

    def _forget(self, number: int) -> None:
        with self._lock:
            staged = self._staged.pop(number, None)
            if staged is not None:
                self._staged_bytes -= staged.num_bytes

    def _page_bytes(self, group: int) -> int:
        return self._layout.groups[group].page_bytes
