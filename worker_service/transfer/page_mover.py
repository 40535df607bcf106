"""Carries pages between device and host tier, as tickets say, in a few threads of its own.

The cache service decides what moves, this reports what became of it. A page counts as done only when every group of it
has arrived and passed its checks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from session.messages import Ack
from session.words import HostTierKind, Transfer, TransferStatus
from tier_client import page_codec
from tier_client.breaker import Breaker
from tier_client.errors import HostTierError, PageRejected
from tier_client.large_pages import PART_BYTES
from worker_service.core.ports import HostTier
from worker_service.transfer.moved_pages import MovedPage, PageFrame, PageStore, moved_pages
from worker_service.transfer.page_needs import PageNeeds
from worker_service.transfer.page_parts import PageParts

PAGES_PER_COMMAND = 8
Barrier = Callable[[], None]
_log = logging.getLogger(__name__)


class MoverLimits(NamedTuple):
    """`part_bytes`: pages of more than this move in parts of this size."""

    threads: int = 2
    max_queued: int = 256
    part_bytes: int = PART_BYTES
    breaker_failures: int = 3
    breaker_s: float = 1.0


class _Outcome(NamedTuple):
    num_done: int
    status: TransferStatus
    num_bytes: int
    waited_s: float = 0.0


class PageMover:
    """Runs transfers and hands an Ack for each, exactly one, to `on_ack` in the event loop."""

    def __init__(
        self,
        pages: PageStore,
        tier: HostTier | None,
        frame: PageFrame,
        on_ack: Callable[[Ack], None],
        limits: MoverLimits,
    ) -> None:
        self._pages = pages
        self._tier = tier
        self._frame = frame
        self._on_ack = on_ack
        self._limits = limits
        self._parts = PageParts(pages, frame, limits.part_bytes)
        self._needs = PageNeeds()
        self._breaker = Breaker(limits.breaker_s, limits.breaker_failures)
        self._threads = ThreadPoolExecutor(limits.threads, thread_name_prefix="page-mover")
        self._running: set[asyncio.Future[Ack]] = set()
        self._local = threading.local()

    def fetch(self, transfer: Transfer, barrier: Barrier) -> None:
        """Starts a copy from the host tier to the device.

        `barrier` returns once no launch writes to the granted pages.
        """
        timed = _TimedBarrier(barrier)
        self._start(transfer, lambda tier: self._fetch(tier, transfer, timed)._replace(waited_s=timed.waited_s))

    def spill(self, transfer: Transfer) -> None:
        """Starts a copy from the device to the host tier.

        The ticket pins the pages, so it need not wait for a launch.
        """
        self._start(transfer, lambda tier: self._spill(tier, transfer))

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def drain(self) -> None:
        """Waits until every transfer that was started has been acknowledged."""
        while self._running:
            await asyncio.wait(set(self._running))
        await asyncio.sleep(0)  # acks that were due at once are handed over by callbacks of the next round

    async def close(self) -> None:
        await self.drain()
        self._threads.shutdown()
        if self._tier is not None:
            self._tier.close()

    def _start(self, transfer: Transfer, work: Callable[[HostTier], _Outcome]) -> None:
        loop = asyncio.get_running_loop()
        tier = self._tier
        if tier is None or len(self._running) >= self._limits.max_queued or self._breaker.is_open:
            loop.call_soon(self._on_ack, Ack(transfer.ticket, 0, TransferStatus.FAILED))
            return
        if tier.kind is HostTierKind.PRIVATE:
            tier.note_needs(self._needs.of(transfer))
        running = loop.run_in_executor(self._threads, self._timed, transfer, lambda: work(tier))
        self._running.add(running)
        running.add_done_callback(self._hand_over)

    def _hand_over(self, running: asyncio.Future[Ack]) -> None:
        self._running.discard(running)
        self._on_ack(running.result())

    def _timed(self, transfer: Transfer, work: Callable[[], _Outcome]) -> Ack:
        """Returns an ack also after a failure: a ticket without one would pin its pages for good."""
        started = time.monotonic()
        try:
            with self._own_stream():
                outcome = _Outcome(0, TransferStatus.FAILED, 0) if self._breaker.is_open else work()
        except Exception:
            _log.exception("transfer %d failed", transfer.ticket)
            outcome = _Outcome(0, TransferStatus.FAILED, 0)
        # What the launches took is no part of the transfer's rate.
        seconds = max(time.monotonic() - started - outcome.waited_s, 1e-9)
        return Ack(transfer.ticket, outcome.num_done, outcome.status, outcome.num_bytes, seconds)

    def _own_stream(self) -> AbstractContextManager[object]:
        """Returns a context in which a CUDA device's copies run on the thread's own stream, beside the launches."""
        if self._pages.device.type != "cuda":
            return nullcontext()
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._pages.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._local.stream)

    def _fetch(self, tier: HostTier, transfer: Transfer, barrier: Barrier) -> _Outcome:
        return self._moved(transfer, lambda items, end: self._fetch_some(tier, items, end, barrier))

    def _moved(self, transfer: Transfer, move_some: Callable[[list[MovedPage], int], _Outcome]) -> _Outcome:
        """Moves some pages after the other, up to the first that does not arrive."""
        num_done, num_bytes, status = 0, 0, TransferStatus.DONE
        while num_done < transfer.num_pages and status is TransferStatus.DONE:
            end = min(num_done + _pages_per_command(transfer), transfer.num_pages)
            try:
                some = move_some(moved_pages(transfer, num_done, end), end)
            except HostTierError as error:
                self._breaker.failed()
                _log.warning("transfer %d: %s", transfer.ticket, error)
                return _Outcome(num_done, TransferStatus.FAILED, num_bytes)
            self._breaker.succeeded()
            num_done, status, num_bytes = some.num_done, some.status, num_bytes + some.num_bytes
        return _Outcome(num_done, status, num_bytes)

    def _fetch_some(self, tier: HostTier, items: list[MovedPage], end: int, barrier: Barrier) -> _Outcome:
        """Fetches pages up to page number `end`; the outcome's `num_done` counts as `end` does."""
        whole = [item for item in items if not self._parts.takes(item)]
        values = self._get(tier, whole)
        checked = [(item, self._checked(item, value)) for item, value in zip(whole, values, strict=True)]
        bad = [(item.page, data) for item, data in checked if isinstance(data, TransferStatus)]
        end, status = min(bad, key=_worst_first, default=(end, TransferStatus.DONE))
        num_bytes = 0
        for item in (item for item in items if self._parts.takes(item)):
            if item.page >= end:
                break
            fetched = self._parts.fetch(tier, item, barrier)
            if fetched is not TransferStatus.DONE:
                end, status = item.page, fetched
                break
            num_bytes += self._pages.page_bytes(item.group)
        barrier()
        good = [(item, data) for item, data in checked if isinstance(data, memoryview) and item.page < end]
        return _Outcome(end, status, num_bytes + self._write(good))

    def _get(self, tier: HostTier, items: list[MovedPage]) -> list[bytearray | None]:
        max_bytes = page_codec.HEADER_BYTES + max((self._pages.page_bytes(item.group) for item in items), default=0)
        return tier.get([item.key for item in items], max_bytes)

    def _checked(self, item: MovedPage, value: bytearray | None) -> memoryview | TransferStatus:
        """Returns the page's bytes, or MISSING or CORRUPT."""
        if value is None:
            return TransferStatus.MISSING
        try:
            size = self._pages.page_bytes(item.group)
            return page_codec.decode(value, self._frame.kind(item.group), item.key, size, self._frame.digest)
        except PageRejected as error:
            _log.warning("page of group %d rejected: %s", item.group, error)
            return TransferStatus.CORRUPT

    def _write(self, good: list[tuple[MovedPage, memoryview]]) -> int:
        for group in sorted({item.group for item, _ in good}):
            mine = [(item.page_id, data) for item, data in good if item.group == group]
            rows = self._pages.host_buffer(group, len(mine))
            for row, (_, data) in zip(rows, mine, strict=True):
                row.copy_(torch.frombuffer(data, dtype=torch.uint8))
            self._pages.write_pages(group, [page_id for page_id, _ in mine], rows)
        return sum(len(data) for _, data in good)

    def _spill(self, tier: HostTier, transfer: Transfer) -> _Outcome:
        return self._moved(transfer, lambda items, end: self._spill_some(tier, items, end))

    def _spill_some(self, tier: HostTier, items: list[MovedPage], end: int) -> _Outcome:
        """Spills pages up to page number `end`; FAILED where the store is full."""
        whole = [item for item in items if not self._parts.takes(item)]
        num_stored = tier.put([item.key for item in whole], self._read(whole))
        num_bytes = sum(self._pages.page_bytes(item.group) for item in whole[:num_stored])
        status = TransferStatus.DONE
        if num_stored < len(whole):
            end, status = whole[num_stored].page, TransferStatus.FAILED
        for item in (item for item in items if self._parts.takes(item)):
            if item.page >= end:
                break
            if not self._parts.spill(tier, item):
                end, status = item.page, TransferStatus.FAILED
                break
            num_bytes += self._pages.page_bytes(item.group)
        if status is TransferStatus.FAILED:
            _log.warning("a spill ends early: the store is full")
        return _Outcome(end, status, num_bytes)

    def _read(self, items: list[MovedPage]) -> list[tuple[bytes, memoryview]]:
        payloads: dict[MovedPage, memoryview] = {}
        for group in sorted({item.group for item in items}):
            mine = [item for item in items if item.group == group]
            rows = self._pages.read_pages(group, [item.page_id for item in mine])
            for item, row in zip(mine, rows, strict=True):
                payloads[item] = memoryview(row.numpy())
        return [(self._header(item, payloads[item]), payloads[item]) for item in items]

    def _header(self, item: MovedPage, payload: memoryview) -> bytes:
        return page_codec.encode_header(self._frame.kind(item.group), item.key, payload, self._frame.digest)


def _pages_per_command(transfer: Transfer) -> int:
    """Returns how many pages one command may hold, so that it has at most PAGES_PER_COMMAND values."""
    return max(1, PAGES_PER_COMMAND // max(1, len(transfer.groups)))


def _worst_first(bad: tuple[int, TransferStatus]) -> tuple[int, bool]:
    """Of one page that is both missing and corrupt, corrupt is what counts."""
    page, status = bad
    return page, status is not TransferStatus.CORRUPT


class _TimedBarrier:
    """A barrier that counts how long it was waited for."""

    def __init__(self, barrier: Barrier) -> None:
        self._barrier = barrier
        self.waited_s = 0.0

    def __call__(self) -> None:
        started = time.monotonic()
        self._barrier()
        self.waited_s += time.monotonic() - started
