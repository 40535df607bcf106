"""Pages that requests are about to need, read and verified before SGLang counts on them.

SGLang aborts a request whose load fails after the linker has agreed to it, and asks its linker in the scheduler's
thread. So a lookup begins to read at once in another thread, waits a little, and counts the pages that have come whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from session.words import TransferStatus
from tier_client.client import TierClient
from tier_client.values import Hit, PagePath

# Pages of one read, after which those that came count.
READ_PAGES = 32
# What nobody asks for any more is dropped after this time.
KEPT_S = 30.0
# Lookups may wait for this share of the time.
WAIT_SHARE = 0.1


class PageReads:
    """What the tier has of each request, by SGLang's request id. One thread calls; others read."""

    def __init__(
        self,
        client: TierClient,
        page_bytes: int,
        max_bytes: int,
        wait_s: float,
        threads: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._page_bytes, self._clock = client, page_bytes, clock
        self._most_pages = max(1, max_bytes // page_bytes)
        self._credit = _WaitCredit(wait_s, clock)
        self._pool = ThreadPoolExecutor(threads, "stemcache-read")
        self._lock = threading.Lock()
        self._num_pages = 0  # of all reads, those on their way included
        self._reads: dict[str, _Read] = {}

    def verified(self, request: str, page_ids: Sequence[bytes]) -> int:
        """Returns how many of the first pages can be loaded now."""
        self._drop_old()
        read = self._reads.get(request)
        if read is None or read.page_ids != tuple(page_ids):
            self.drop(request)
            read = self._reads[request] = _Read(tuple(page_ids))
            self._pool.submit(self._run, read)
        read.asked_s = self._clock()
        with self._credit as most_s:
            read.ended.wait(most_s)
        return len(read.pages)

    def take(self, request: str, page_ids: Sequence[bytes]) -> list[memoryview] | None:
        """Returns the bytes of these pages, the first of those that were asked for; None where they are not there."""
        read = self._reads.pop(request, None)
        if read is None:
            return None
        count = len(page_ids)
        pages = read.pages[:count]
        self._end(read)
        return pages if len(pages) == count and read.page_ids[:count] == tuple(page_ids) else None

    def drop(self, request: str) -> None:
        read = self._reads.pop(request, None)
        if read is not None:
            self._end(read)

    def clear(self) -> None:
        for request in list(self._reads):
            self.drop(request)

    def close(self) -> None:
        self.clear()
        self._pool.shutdown(cancel_futures=True)

    def _drop_old(self) -> None:
        before_s = self._clock() - KEPT_S
        for request in [name for name, read in self._reads.items() if read.asked_s < before_s]:
            self.drop(request)

    def _end(self, read: _Read) -> None:
        with self._lock:
            read.is_over = True
            self._num_pages -= read.reserved_pages
            read.reserved_pages = 0

    # In a thread of the pool.

    def _run(self, read: _Read) -> None:
        try:
            hit = None if read.is_over else self._client.calls.lookup(PagePath(b"".join(read.page_ids)), 0)
            if hit is not None and hit.lease:
                status = self._read_pages(read, hit)
                self._client.calls.release(hit, len(read.pages), status)
                if status in (TransferStatus.MISSING, TransferStatus.FAILED):
                    self._client.calls.suspect_store()
        finally:
            read.ended.set()

    def _read_pages(self, read: _Read, hit: Hit) -> TransferStatus:
        keys = hit.pages[0].keys(self._client.config.rank)
        while len(read.pages) < len(keys):
            first = len(read.pages)
            count = self._reserve(read, min(READ_PAGES, len(keys) - first))
            if not count:
                break
            got = self._client.store.read(0, keys[first : first + count], self._page_bytes)
            read.pages.extend(got.values)
            if len(got.values) < count:
                return got.status
        return TransferStatus.DONE

    def _reserve(self, read: _Read, most: int) -> int:
        with self._lock:
            count = 0 if read.is_over else min(most, self._most_pages - self._num_pages)
            read.reserved_pages += count
            self._num_pages += count
            return count


class _Read:
    """One request's pages, from the first that the device lacks."""

    def __init__(self, page_ids: tuple[bytes, ...]) -> None:
        self.page_ids = page_ids
        self.pages: list[memoryview] = []  # grows by verified pages, in their order
        self.reserved_pages = 0
        self.asked_s = 0.0
        self.ended = threading.Event()
        self.is_over = False


class _WaitCredit:
    """How long the scheduler may be held: `most_s` at once, and WAIT_SHARE of the time in all."""

    def __init__(self, most_s: float, clock: Callable[[], float]) -> None:
        self._most_s, self._clock = most_s, clock
        self._left_s, self._at_s = most_s, clock()

    def __enter__(self) -> float:
        now_s = self._clock()
        self._left_s = min(self._most_s, self._left_s + WAIT_SHARE * (now_s - self._at_s))
        self._at_s = now_s
        return max(self._left_s, 0.0)

    def __exit__(self, *_: object) -> None:
        now_s = self._clock()
        self._left_s -= now_s - self._at_s
        self._at_s = now_s
