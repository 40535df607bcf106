"""Carries pages between device and host tier, as tickets say, in a few threads of its own.

The cache service decides what moves, this reports what became of it. A page counts as done only when every group of it
has arrived and passed its checks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

from session.messages import Ack
from session.words import Transfer, TransferPages, TransferStatus
from worker_service.core import page_codec
from worker_service.core.errors import HostTierError, PageRejected
from worker_service.core.page_codec import CODEC_RAW, Digest, PageKind
from worker_service.core.ports import HostTier

PAGES_PER_COMMAND = 8
# Without tensor parallelism a worker is its only rank.
RANK = 0
Barrier = Callable[[], None]
_log = logging.getLogger(__name__)


class PageStore(Protocol):
    """The device side: pages of every group as rows of bytes in host memory."""

    @property
    def device(self) -> torch.device: ...

    def page_bytes(self, group: int) -> int: ...

    def read_pages(self, group: int, page_ids: Sequence[int]) -> torch.Tensor: ...

    def write_pages(self, group: int, page_ids: Sequence[int], packed: torch.Tensor) -> None: ...

    def host_buffer(self, group: int, num_pages: int) -> torch.Tensor: ...


class MoverLimits(NamedTuple):
    threads: int = 2
    max_queued: int = 256
    breaker_failures: int = 3
    breaker_s: float = 1.0


class PageFrame(NamedTuple):
    """What every page of this worker is framed with: a code of each group's element type, and the checksum function."""

    dtypes: tuple[int, ...]
    digest: Digest

    def kind(self, group: int) -> PageKind:
        return PageKind(CODEC_RAW, self.dtypes[group], group, RANK)


class _Item(NamedTuple):
    """One page of one group within a transfer; `page` counts from the transfer's first page."""

    page: int
    group: int
    page_id: int
    key: bytes


class _Outcome(NamedTuple):
    num_done: int
    status: TransferStatus
    num_bytes: int


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
        self._breaker = _CircuitBreaker(limits.breaker_failures, limits.breaker_s)
        self._threads = ThreadPoolExecutor(limits.threads, thread_name_prefix="page-mover")
        self._running: set[asyncio.Future[Ack]] = set()
        self._local = threading.local()

    def fetch(self, transfer: Transfer, barrier: Barrier) -> None:
        """Starts a copy from the host tier to the device.

        `barrier` returns once no launch writes to the granted pages.
        """
        self._start(transfer, lambda tier: self._fetch(tier, transfer, barrier))

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
        if tier is None or len(self._running) >= self._limits.max_queued or self._breaker.is_open():
            loop.call_soon(self._on_ack, Ack(transfer.ticket, 0, TransferStatus.FAILED))
            return
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
                outcome = _Outcome(0, TransferStatus.FAILED, 0) if self._breaker.is_open() else work()
        except Exception:
            _log.exception("transfer %d failed", transfer.ticket)
            outcome = _Outcome(0, TransferStatus.FAILED, 0)
        return Ack(
            transfer.ticket, outcome.num_done, outcome.status, outcome.num_bytes, max(time.monotonic() - started, 1e-9)
        )

    def _own_stream(self) -> AbstractContextManager[object]:
        """Returns a context in which a CUDA device's copies run on the thread's own stream, beside the launches."""
        if self._pages.device.type != "cuda":
            return nullcontext()
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._pages.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._local.stream)

    def _fetch(self, tier: HostTier, transfer: Transfer, barrier: Barrier) -> _Outcome:
        num_done, num_bytes = 0, 0
        while num_done < transfer.num_pages:
            end = min(num_done + _pages_per_command(transfer), transfer.num_pages)
            items = _items(transfer, num_done, end)
            try:
                values = self._get(tier, items)
            except HostTierError as error:
                self._breaker.failed()
                _log.warning("fetch %d: %s", transfer.ticket, error)
                return _Outcome(num_done, TransferStatus.FAILED, num_bytes)
            self._breaker.worked()
            checked = [self._checked(item, value) for item, value in zip(items, values, strict=True)]
            bad = [
                (item.page, data) for item, data in zip(items, checked, strict=True) if isinstance(data, TransferStatus)
            ]
            good_end = min((page for page, _ in bad), default=end)
            pairs = zip(items, checked, strict=True)
            good = [(item, data) for item, data in pairs if isinstance(data, memoryview) and item.page < good_end]
            barrier()
            num_bytes += self._write(good)
            num_done = good_end
            if good_end < end:
                is_corrupt = (good_end, TransferStatus.CORRUPT) in bad
                return _Outcome(num_done, TransferStatus.CORRUPT if is_corrupt else TransferStatus.MISSING, num_bytes)
        return _Outcome(num_done, TransferStatus.DONE, num_bytes)

    def _get(self, tier: HostTier, items: list[_Item]) -> list[bytearray | None]:
        max_bytes = page_codec.HEADER_BYTES + max((self._pages.page_bytes(item.group) for item in items), default=0)
        return tier.get([item.key for item in items], max_bytes)

    def _checked(self, item: _Item, value: bytearray | None) -> memoryview | TransferStatus:
        """Returns the page's bytes, or MISSING or CORRUPT."""
        if value is None:
            return TransferStatus.MISSING
        try:
            size = self._pages.page_bytes(item.group)
            return page_codec.decode(value, self._frame.kind(item.group), item.key, size, self._frame.digest)
        except PageRejected as error:
            _log.warning("page of group %d rejected: %s", item.group, error)
            return TransferStatus.CORRUPT

    def _write(self, good: list[tuple[_Item, memoryview]]) -> int:
        for group in sorted({item.group for item, _ in good}):
            mine = [(item.page_id, data) for item, data in good if item.group == group]
            rows = self._pages.host_buffer(group, len(mine))
            for row, (_, data) in zip(rows, mine, strict=True):
                row.copy_(torch.frombuffer(data, dtype=torch.uint8))
            self._pages.write_pages(group, [page_id for page_id, _ in mine], rows)
        return sum(len(data) for _, data in good)

    def _spill(self, tier: HostTier, transfer: Transfer) -> _Outcome:
        num_done, num_bytes = 0, 0
        while num_done < transfer.num_pages:
            end = min(num_done + _pages_per_command(transfer), transfer.num_pages)
            items = _items(transfer, num_done, end)
            values = self._read(items)
            try:
                num_stored = tier.put([item.key for item in items], values)
            except HostTierError as error:
                self._breaker.failed()
                _log.warning("spill %d: %s", transfer.ticket, error)
                return _Outcome(num_done, TransferStatus.FAILED, num_bytes)
            self._breaker.worked()
            num_bytes += sum(len(payload) for _, payload in values[:num_stored])
            if num_stored < len(items):
                return _Outcome(items[num_stored].page, TransferStatus.FAILED, num_bytes)
            num_done = end
        return _Outcome(num_done, TransferStatus.DONE, num_bytes)

    def _read(self, items: list[_Item]) -> list[tuple[bytes, memoryview]]:
        payloads: dict[_Item, memoryview] = {}
        for group in sorted({item.group for item in items}):
            mine = [item for item in items if item.group == group]
            rows = self._pages.read_pages(group, [item.page_id for item in mine])
            for item, row in zip(mine, rows, strict=True):
                payloads[item] = memoryview(row.numpy())
        return [(self._header(item, payloads[item]), payloads[item]) for item in items]

    def _header(self, item: _Item, payload: memoryview) -> bytes:
        return page_codec.encode_header(self._frame.kind(item.group), item.key, payload, self._frame.digest)


def _pages_per_command(transfer: Transfer) -> int:
    """Returns how many pages one command may hold, so that it has at most PAGES_PER_COMMAND values."""
    return max(1, PAGES_PER_COMMAND // max(1, len(transfer.groups)))


def _items(transfer: Transfer, start: int, end: int) -> list[_Item]:
    """Returns the values of the pages [start, end), page by page, so that leading values mean leading pages."""
    tables = [(group, _page_ids(group)) for group in transfer.groups]
    return [
        _Item(page, group.group, page_ids[page], group.key(page, RANK))
        for page in range(start, end)
        for group, page_ids in tables
        if page_ids[page]
    ]


def _page_ids(group: TransferPages) -> array[int]:
    page_ids = array("I")
    page_ids.frombytes(group.page_ids)
    return page_ids


class _CircuitBreaker:
    """A circuit breaker: opens for `open_s` after `max_failures` failures in a row.

    The cache service has one of its own.
    """

    def __init__(self, max_failures: int, open_s: float) -> None:
        self._max_failures = max_failures
        self._open_s = open_s
        self._failures = 0
        self._open_until = 0.0

    def is_open(self) -> bool:
        return time.monotonic() < self._open_until

    def worked(self) -> None:
        self._failures = 0

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= self._max_failures:
            self._open_until = time.monotonic() + self._open_s
