"""Reads and writes one rank's pages in the store, framed and verified. Raises nothing: what fails is an outcome.

A page of more than `part_bytes` moves in parts, as one Redis hash.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import xxhash

from session.words import TransferStatus
from tier_client.breaker import Breaker
from tier_client.errors import HostTierError, PageAbsent, PageRejected
from tier_client.fetch_rate import FetchRate
from tier_client.large_pages import PART_BYTES, LargePage
from tier_client.page_codec import CODEC_RAW, HEADER_BYTES, PageKind, decode, encode_header
from tier_client.redis_tier import RedisTier

# Between two looks at the clock.
PAGES_AT_ONCE = 16
# Of a page whose layout only its engine knows.
NO_DTYPE = 0

Buffer = bytes | bytearray | memoryview

_log = logging.getLogger(__name__)


class Read(NamedTuple):
    """The leading pages that were there and right; `status` says what became of the next one."""

    values: list[memoryview]
    status: TransferStatus


class PageStore:
    """Any number of threads may call it. While the breaker is open nothing is asked, and everything has failed.

    `transfer_timeout_s` is for one call of `read` or `write`; `replicated`: groups whose pages are of all ranks.
    """

    def __init__(
        self,
        tier: RedisTier,
        rank: int,
        breaker: Breaker,
        transfer_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        part_bytes: int = PART_BYTES,
        replicated: Collection[int] = (),
    ) -> None:
        self._tier, self._rank, self._breaker = tier, rank, breaker
        self._transfer_timeout_s, self._clock = transfer_timeout_s, clock
        self._part_bytes, self._replicated = part_bytes, replicated
        self.rate = FetchRate()

    def identity(self) -> str | None:
        """Returns the store's name, which changes when it was flushed; None where it does not answer."""
        if self._breaker.is_open:
            return None
        try:
            return self._tier.identity()
        except HostTierError as error:
            self._failed(error)
            return None

    def write(self, group: int, keys: Sequence[bytes], payloads: Sequence[Buffer]) -> tuple[int, TransferStatus]:
        """Returns how many leading pages were stored, and FAILED where the store did not answer; DONE in a full one.

        A payload that is no bytes ends them, and the log says so.
        """
        if self._breaker.is_open:
            return 0, TransferStatus.FAILED
        kind, done, values = self._kind(group), 0, _leading_bytes(payloads[: len(keys)])
        until_s = self._clock() + self._transfer_timeout_s
        try:
            while done < len(values):
                self._check_time(until_s)
                now = slice(done, min(done + PAGES_AT_ONCE, len(values)))
                stored = self._write_some(kind, keys[now], values[now])
                done += stored
                if stored < len(values[now]):
                    break
        except HostTierError as error:
            self._failed(error)
            return done, TransferStatus.FAILED
        return done, TransferStatus.DONE

    def _write_some(self, kind: PageKind, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> int:
        if payloads[0].nbytes > self._part_bytes:
            for count, (key, payload) in enumerate(zip(keys, payloads, strict=True)):
                if not self._write_parts(kind, key, payload):
                    return count
            return len(keys)
        values = [
            (encode_header(kind, key, payload, xxhash.xxh3_128_digest), payload)
            for key, payload in zip(keys, payloads, strict=True)
        ]
        return self._tier.put(keys, values)

    def _write_parts(self, kind: PageKind, key: bytes, payload: memoryview) -> bool:
        page = LargePage(kind, key, payload.nbytes, self._part_bytes)
        cut = lambda part: payload[part.first_byte : part.first_byte + part.num_bytes]  # noqa: E731
        return page.put(self._tier, cut, xxhash.xxh3_128_digest)

    def read(self, group: int, keys: Sequence[bytes], page_bytes: int) -> Read:
        """Returns pages up to the first that is absent or not right."""
        if self._breaker.is_open:
            return Read([], TransferStatus.FAILED)
        kind = self._kind(group)
        found: list[memoryview] = []
        start_s = self._clock()
        until_s = start_s + self._transfer_timeout_s
        try:
            while len(found) < len(keys):
                self._check_time(until_s)
                self._read_some(kind, keys[len(found) : len(found) + PAGES_AT_ONCE], page_bytes, found)
        except PageAbsent:
            return Read(found, TransferStatus.MISSING)
        except PageRejected as error:
            _log.warning("a page of group %d rejected: %s", group, error)
            return Read(found, TransferStatus.CORRUPT)
        except HostTierError as error:
            self._failed(error)
            return Read(found, TransferStatus.FAILED)
        self.rate.add(len(found) * page_bytes, self._clock() - start_s)
        return Read(found, TransferStatus.DONE)

    def _read_some(self, kind: PageKind, keys: Sequence[bytes], page_bytes: int, found: list[memoryview]) -> None:
        """Appends to `found`, page by page."""
        if page_bytes > self._part_bytes:
            for key in keys:
                found.append(self._read_parts(kind, key, page_bytes))
            return
        for key, value in zip(keys, self._tier.get(keys, page_bytes + HEADER_BYTES), strict=True):
            if value is None:
                raise PageAbsent
            found.append(decode(value, kind, key, page_bytes, xxhash.xxh3_128_digest))

    def _check_time(self, until_s: float) -> None:
        """Raises HostTierError after `until_s`: each command may be in time, and all of them together take too long."""
        if self._clock() >= until_s:
            raise HostTierError(f"a transfer took longer than {self._transfer_timeout_s:g} s")

    def _read_parts(self, kind: PageKind, key: bytes, page_bytes: int) -> memoryview:
        page = bytearray(page_bytes)
        for part, payload in LargePage(kind, key, page_bytes, self._part_bytes).get(self._tier, xxhash.xxh3_128_digest):
            page[part.first_byte : part.first_byte + part.num_bytes] = payload
        return memoryview(page)

    def close(self) -> None:
        self._tier.close()

    def _kind(self, group: int) -> PageKind:
        return PageKind(CODEC_RAW, NO_DTYPE, group, 0 if group in self._replicated else self._rank)

    def _failed(self, error: HostTierError) -> None:
        self._breaker.failed()
        _log.warning("the host tier does not answer: %s", error)


def as_bytes(given: Buffer, page_bytes: int | None = None) -> memoryview:
    """Returns a view of a page's bytes. Raises TypeError for what has none in one piece, or not as many."""
    try:
        with memoryview(given) as view:
            holds_objects = "O" in view.format  # their addresses would be saved
            found = None if holds_objects else view.cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(f"is a {type(given).__name__}: {error}") from None
    if found is None:
        raise TypeError(f"is a {type(given).__name__} of Python objects")
    if page_bytes is not None and found.nbytes != page_bytes:
        raise TypeError(f"has {found.nbytes} bytes, not {page_bytes}")
    return found


def _leading_bytes(payloads: Sequence[Buffer]) -> list[memoryview]:
    found: list[memoryview] = []
    for payload in payloads:
        try:
            found.append(as_bytes(payload))
        except TypeError as error:
            _log.warning("a page is not written: its payload %s", error)
            break
    return found
