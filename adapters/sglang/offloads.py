"""Pages on their way to the host tier, in a thread of their own; SGLang keeps them on the device until they ended."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from adapters.sglang.pool_pages import PoolPages
from tier_client.client import TierClient
from tier_client.page_store import Buffer
from tier_client.values import PagePath, PageRange

# Pages that are in host memory at once take about this much of it.
STAGED_BYTES = 64 << 20

_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """Pages of one group: the last ones of the offload's path, as many as `indices` are of."""

    group: int
    num_pages: int
    indices: torch.Tensor


class Offload(NamedTuple):
    """`ready` waits until the pages are written on the device."""

    page_ids: tuple[bytes, ...]
    parts: tuple[Part, ...]
    ready: Callable[[], None]


class Offloads:
    """Ends in the order in which they began, also those for which there was no room: every rank counts alike.

    `pages`: by the number of the group. The first is of all tokens.
    """

    def __init__(self, client: TierClient, pages: Sequence[PoolPages], max_waiting: int) -> None:
        self._client, self._pages = client, pages
        self._max_waiting = max_waiting
        self._at_once = max(1, STAGED_BYTES // pages[0].page_bytes)
        self._queue: queue.SimpleQueue[Offload | threading.Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting = 0  # of those that will be written
        self._ended: deque[bool] = deque()
        self._is_void = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stemcache-offload", daemon=True)
        self._thread.start()

    def add(self, page_ids: Sequence[bytes], parts: Sequence[Part], ready: Callable[[], None]) -> None:
        with self._lock:
            has_room = self._num_waiting < self._max_waiting
            self._num_waiting += has_room
        # One without pages keeps the order.
        self._queue.put(Offload(tuple(page_ids) if has_room else (), tuple(parts), ready))

    def num_ended(self) -> int:
        return len(self._ended)

    def pop_ended(self) -> bool:
        """Returns whether all pages of the oldest one are in the tier, or were there."""
        return self._ended.popleft()

    def drain(self) -> None:
        """Waits until nothing reads the device's pages any more; what is queued is not written, and is not reported."""
        self._is_void.set()
        idle = threading.Event()
        self._queue.put(idle)
        idle.wait()
        self._is_void.clear()
        self._ended.clear()

    def close(self) -> None:
        self._is_void.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (offload := self._queue.get()) is not None:
            if isinstance(offload, threading.Event):
                offload.set()
                continue
            is_done = False
            try:
                offload.ready()
                if offload.page_ids:
                    is_done = self._write(offload)
            except Exception:
                _log.exception("an offload failed")  # the thread goes on: without it nothing would end any more
            with self._lock:
                self._num_waiting -= bool(offload.page_ids)
            self._ended.append(is_done)

    def _write(self, offload: Offload) -> bool:
        """Some pages after the other, each with what the other groups have for them."""
        wanted = sum(part.num_pages for part in offload.parts)
        num_written = 0
        for first in range(0, len(offload.page_ids), self._at_once):
            if self._is_void.is_set():
                return False
            num_written += self._write_some(offload, first)
        return num_written == wanted

    def _write_some(self, offload: Offload, first: int) -> int:
        """Returns how many of the pages the tier has now."""
        ids = offload.page_ids[first : first + self._at_once]
        starts = {part.group: len(offload.page_ids) - part.num_pages - first for part in offload.parts}
        indices = {part.group: part.indices for part in offload.parts}
        ranges = [PageRange(group, max(0, start), len(ids)) for group, start in starts.items() if start < len(ids)]

        def payloads(group: int, pages: tuple[int, ...]) -> list[Buffer]:
            places = [page - starts[group] for page in pages]
            host = self._pages[group].read(self._pages[group].rows(indices[group], places))
            return [memoryview(row.numpy()) for row in host]

        return self._client.save_batches(PagePath(b"".join(ids)), ranges, payloads).num_there
