"""Pages that requests are about to need, read and verified before SGLang is told of them.

SGLang aborts a request whose load fails after the linker has agreed to it, and asks its linker in the scheduler's
thread. So a lookup begins to read at once in another thread, waits a little, and counts the pages that have come whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from adapters.sglang.lookup_budget import LookupBudget
from adapters.sglang.ranks import Least
from session.words import TransferStatus
from tier_client.client import TierClient
from tier_client.values import Hit, PageGroup, PagePath

# Pages of one read, after which those that came count.
READ_PAGES = 32
# What is not asked for any more is dropped after this time.
KEPT_S = 30.0
# How often ranks that found different boundaries (windows, states) read again, up to the least of them.
MAX_ROUNDS = 4


class PageReads:
    """What the tier has of each request, by SGLang's request id. One thread calls; others read.

    The client's first group is FULL. Where it is the only one, any of its pages from the first on count; with windows
    or states all that is read for the boundary counts, or nothing. Ranks evict and lose pages apart: `least` has them
    agree, and is called by all of them or none.
    """

    def __init__(
        self,
        client: TierClient,
        max_bytes: int,
        wait_s: float,
        threads: int,
        least: Least = list,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._clock, self._max_bytes, self._least = client, clock, max_bytes, least
        self._page_bytes, *_ = [group.page_bytes for group in client.config.groups]
        self._apart_bytes = sum(
            group.page_bytes * _reach_pages(group, client.config.page_tokens) for group in client.config.groups[1:]
        )
        self._budget = LookupBudget(wait_s, clock)
        self._pool = ThreadPoolExecutor(threads, "stemcache-read")
        self._lock = threading.Lock()
        self._num_bytes = 0  # of all reads, those on their way included
        self._reads: dict[str, _Read] = {}

    def lengths(self, request: str, page_ids: Sequence[bytes]) -> list[int]:
        """Returns numbers of leading pages that can be loaded now, rising; with windows or states one at most, which
        is the same on every rank."""
        self._drop_old()
        asked = tuple(page_ids)
        found = self._found(request, asked, len(asked))
        if len(self._client.config.groups) == 1:
            return found  # SGLang takes what all ranks have of these
        for _ in range(MAX_ROUNDS):
            end = max(found, default=0)
            least, most = self._least([end, -end])
            if least == -most or not least:
                return [least] if least else []
            found = self._found(request, asked, least)
        return []

    def _found(self, request: str, asked: tuple[bytes, ...], end: int) -> list[int]:
        """Returns the boundaries up to `end` that are read by now; begins to read unless that is under way."""
        read = self._reads.get(request)
        if read is None or read.asked != asked or max(read.lengths(), default=0) > end:
            self.drop(request)
            read = self._reads[request] = _Read(asked, end, len(self._client.config.groups))
            self._pool.submit(self._run, read)
        read.asked_s = self._clock()
        with self._budget as most_s:
            read.ended.wait(most_s)
        return read.lengths()

    def take(self, request: str, page_ids: Sequence[bytes]) -> list[list[memoryview]] | None:
        """Returns by group the bytes of its pages for a load that ends with `page_ids`, the first of those asked for.

        None where they are not there, or not on every rank: one that loads would wait for one that computes.
        """
        read = self._reads.pop(request, None)
        values, count = None, len(page_ids)
        if read is not None:
            if count in read.lengths() and read.page_ids[:count] == tuple(page_ids):
                values = [read.values[0][:count], *read.values[1:]]
            self._end(read)
        (is_everywhere,) = self._least([values is not None])
        return values if is_everywhere else None

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
            self._num_bytes -= read.reserved_bytes
            read.reserved_bytes = 0

    # In a thread of the pool.

    def _run(self, read: _Read) -> None:
        try:
            if read.is_over:
                pass
            elif len(read.values) > 1:
                self._read_whole(read)
            else:
                self._read_leading(read)
        finally:
            read.ended.set()

    def _read_whole(self, read: _Read) -> None:
        """All groups up to the last boundary that finds room; what is missing or torn moves it ahead."""
        count = self._reserve(read, len(read.page_ids), self._apart_bytes)
        if not count:
            return
        loaded = self._client.fetch(PagePath(b"".join(read.page_ids[:count])))
        values = [[page for _, page in sorted(pages.items())] for _, pages in sorted(loaded.values.items())]
        with self._lock:
            if len(values) == len(read.values):
                read.values, read.is_whole = values, True
            if not read.is_over:  # what was reserved for pages that are not there
                used_bytes = len(read.values[0]) * self._page_bytes + self._apart_bytes if read.is_whole else 0
                self._num_bytes -= read.reserved_bytes - used_bytes
                read.reserved_bytes = used_bytes

    def _read_leading(self, read: _Read) -> None:
        hit = self._client.calls.lookup(PagePath(b"".join(read.page_ids)), 0)
        if hit is None or not hit.lease:
            return
        status = self._read_pages(read, hit)
        self._client.calls.release(hit, len(read.values[0]), status)
        if status in (TransferStatus.MISSING, TransferStatus.FAILED):
            self._client.calls.suspect_store()

    def _read_pages(self, read: _Read, hit: Hit) -> TransferStatus:
        pages, keys = read.values[0], hit.pages[0].keys(self._client.config.rank)
        while len(pages) < len(keys):
            first = len(pages)
            count = self._reserve(read, min(READ_PAGES, len(keys) - first))
            if not count:
                break
            got = self._client.store.read(0, keys[first : first + count], self._page_bytes)
            pages.extend(got.values)
            if len(got.values) < count:
                return got.status
        return TransferStatus.DONE

    def _reserve(self, read: _Read, most: int, apart_bytes: int = 0) -> int:
        """Returns how many pages of the first group have room beside `apart_bytes`."""
        with self._lock:
            room_bytes = self._max_bytes - self._num_bytes - apart_bytes
            count = 0 if read.is_over else max(0, min(most, room_bytes // self._page_bytes))
            num_bytes = count * self._page_bytes + (apart_bytes if count else 0)
            read.reserved_bytes += num_bytes
            self._num_bytes += num_bytes
            return count


class _Read:
    """One request's pages, from the first that the device lacks: `asked` for, and of these the first `end` to read."""

    def __init__(self, asked: tuple[bytes, ...], end: int, num_groups: int) -> None:
        self.asked, self.page_ids = asked, asked[:end]
        self.values: list[list[memoryview]] = [[] for _ in range(num_groups)]  # the only one grows by verified pages
        self.is_whole = False  # with several groups: there is something to load, and all of it is here
        self.reserved_bytes = 0
        self.asked_s = 0.0
        self.ended = threading.Event()
        self.is_over = False

    def lengths(self) -> list[int]:
        count = len(self.values[0])
        if len(self.values) == 1:
            return list(range(1, count + 1))
        return [count] if self.is_whole else []


def _reach_pages(group: PageGroup, page_tokens: int) -> int:
    """Returns how many pages of the group before a boundary are read to resume there."""
    return -(-(group.window_tokens - 1) // page_tokens) if group.window_tokens else 1
