"""Pages on their way to the host tier, in a thread of their own; SGLang keeps them on the device until they ended."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from adapters.sglang.pool_pages import PoolPages
from adapters.sglang.saving import save_pages
from tier_client.client import TierClient
from tier_client.page_store import Buffer

# Pages that are in host memory at once take about this much of it.
STAGED_BYTES = 64 << 20


class Offload(NamedTuple):
    """`ready` waits until the pages are written on the device."""

    page_ids: tuple[bytes, ...]
    indices: torch.Tensor
    ready: Callable[[], None]


class Offloads:
    """Ends in the order in which they began, also those for which there was no room: every rank counts alike."""

    def __init__(self, client: TierClient, pages: PoolPages, page_tokens: int, max_waiting: int) -> None:
        self._client, self._pages, self._page_tokens = client, pages, page_tokens
        self._max_waiting = max_waiting
        self._at_once = max(1, STAGED_BYTES // pages.page_bytes)
        self._queue: queue.SimpleQueue[Offload | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting = 0  # of those that will be written
        self._ended: deque[bool] = deque()
        self._is_void = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stemcache-offload", daemon=True)
        self._thread.start()

    def add(self, page_ids: Sequence[bytes], indices: torch.Tensor, ready: Callable[[], None]) -> None:
        with self._lock:
            has_room = self._num_waiting < self._max_waiting
            self._num_waiting += has_room
        # One without pages keeps the order.
        self._queue.put(Offload(tuple(page_ids) if has_room else (), indices, ready))

    def num_ended(self) -> int:
        return len(self._ended)

    def pop_ended(self) -> bool:
        """Returns whether all pages of the oldest one are in the tier, or were there."""
        return self._ended.popleft()

    def drain(self) -> None:
        """Returns when nothing reads the device's pages any more; what waits is not written, and nobody is told."""
        self._is_void.set()
        idle = threading.Event()
        self._queue.put(Offload((), torch.empty(0), idle.set))
        idle.wait()
        self._is_void.clear()
        self._ended.clear()

    def close(self) -> None:
        self._is_void.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (offload := self._queue.get()) is not None:
            is_done = False
            try:
                offload.ready()
                if offload.page_ids:
                    is_done = self._write(offload)
            finally:
                with self._lock:
                    self._num_waiting -= bool(offload.page_ids)
                self._ended.append(is_done)

    def _write(self, offload: Offload) -> bool:
        num_written = 0
        for first in range(0, len(offload.page_ids), self._at_once):
            ids = offload.page_ids[first : first + self._at_once]
            if self._is_void.is_set():
                return False
            num_written += self._write_some(ids, offload.indices[first * self._page_tokens :])
        return num_written == len(offload.page_ids)

    def _write_some(self, ids: tuple[bytes, ...], indices: torch.Tensor) -> int:
        """Returns how many of the pages the tier has now."""

        def payloads(pages: tuple[int, ...]) -> list[Buffer]:
            host = self._pages.read(self._tokens(indices, pages))
            return [memoryview(row.numpy()) for row in host]

        return save_pages(self._client, ids, payloads)

    def _tokens(self, indices: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
        whole = indices[: indices.numel() // self._page_tokens * self._page_tokens].view(-1, self._page_tokens)
        return whole[torch.tensor(pages, device=indices.device)].flatten()
