"""The host tier for another project's engine: fetch what others computed, save what was computed here.

Nothing here raises into the engine, and nothing waits for long: while the service or the store is away, a fetch is a
miss and a save writes nothing. Calls block, so an engine that must not wait calls from a thread of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from session.words import TransferStatus
from tier_client.breaker import Breaker
from tier_client.calls import HostTierCalls
from tier_client.page_store import Buffer, PageStore, as_bytes
from tier_client.redis_tier import RedisTier, RedisTierConfig
from tier_client.requests import Mistakes
from tier_client.values import Hit, KeyedPages, Loaded, PagePath, PageRange, TierClientConfig

_log = logging.getLogger(__name__)

# A page that is not there shortens the next lookup; after the last one the engine computes the rest.
MAX_LOOKUPS = 3


# The bytes of pages of a group, by their numbers in the path.
Payloads = Callable[[int, tuple[int, ...]], Sequence[Buffer]]


class Saved(NamedTuple):
    """`num_findable` pages became findable. Of those asked for the tier has `num_there` now, each group's counted."""

    num_findable: int
    num_there: int


class TierClient:
    """`fetch` and `save` do everything, for an engine of one rank.

    With several ranks one process asks by `calls`; each rank reads and writes its own by `store`, and commits it.
    """

    def __init__(self, config: TierClientConfig) -> None:
        self.config = config
        tier_config = RedisTierConfig(config.num_connections, config.store_timeout_s)
        self._tier = RedisTier(config.redis_url, tier_config)
        self.store = PageStore(
            self._tier,
            config.rank,
            Breaker(config.pause_s),
            config.transfer_timeout_s,
            part_bytes=config.part_bytes,
            replicated=[number for number, group in enumerate(config.groups) if group.replicated],
        )
        self.calls = HostTierCalls(config, self.store)
        self._mistakes = Mistakes(_log)

    def __enter__(self) -> TierClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.calls.close()

    def fetch(self, path: PagePath, local_pages: int = 0) -> Loaded:
        """Returns the longest prefix that the engine can resume from, with the bytes that it lacks for that, verified.

        `usable_pages` is `local_pages` where the tier has nothing to add.
        """
        for _ in range(MAX_LOOKUPS):
            hit = self.calls.lookup(path, local_pages)
            if hit is None or not hit.lease:
                break
            loaded, status = self._load(hit)
            if loaded is not None:
                return loaded
            if status is TransferStatus.FAILED:
                break
        return Loaded(local_pages, {})

    def _load(self, hit: Hit) -> tuple[Loaded | None, TransferStatus]:
        """Reads all pages of a hit, and ends its lease. What is missing is told, so that the next lookup ends there."""
        values: dict[int, dict[int, memoryview]] = {}
        for one in hit.pages:
            read = self.store.read(one.group, one.keys(self.config.rank), self.config.groups[one.group].page_bytes)
            if len(read.values) < len(one.pages):
                self.calls.release(hit, one.pages[len(read.values)] - hit.local_pages, read.status)
                if read.status is not TransferStatus.CORRUPT:
                    self.calls.suspect_store()
                return None, read.status
            values[one.group] = dict(zip(one.pages, read.values, strict=True))
        self.calls.release(hit, hit.usable_pages - hit.local_pages, TransferStatus.DONE)
        return Loaded(hit.usable_pages, values), TransferStatus.DONE

    def save(self, path: PagePath, ranges: Iterable[PageRange], payload: Callable[[int, int], Buffer]) -> int:
        """Writes those pages of the ranges that the tier lacks. Returns how many became findable.

        `payload(group, page)` gives a page's bytes; they must not change until this returns. What it raises comes
        through. Where it returns anything but a page's bytes, nothing of that group is written, and the log says why.
        """

        def payloads(group: int, pages: tuple[int, ...]) -> list[Buffer]:
            return [payload(group, page) for page in pages]

        return self.save_batches(path, ranges, payloads).num_findable

    def save_batches(self, path: PagePath, ranges: Iterable[PageRange], payloads: Payloads) -> Saved:
        """Does the same where an engine gives all pages of a group at once."""
        ticket = self.calls.reserve(path, ranges)
        if ticket is None:
            return Saved(0, 0)
        num_there = ticket.num_asked - sum(len(one.pages) for one in ticket.pages) - ticket.num_refused
        if not ticket.number:
            return Saved(0, max(0, num_there))
        written: list[tuple[int, int]] = []
        status, num_findable = TransferStatus.DONE, None
        try:
            for one in ticket.pages:
                values = self._checked(one, payloads(one.group, one.pages))
                if not values:
                    break
                count, status = self.store.write(one.group, one.keys(self.config.rank), values)
                written.append((one.group, count))
                if status is TransferStatus.FAILED:  # a full store has lost nothing
                    self.calls.suspect_store()
                if count < len(values):
                    break
        finally:  # also when `payloads` raised: others may write what is left
            num_findable = self.calls.commit(ticket, self.config.rank, written, status)
        if num_findable is not None:
            num_there += sum(count for _, count in written)
        return Saved(num_findable or 0, max(0, num_there))

    def _checked(self, pages: KeyedPages, given: Iterable[Buffer]) -> list[memoryview]:
        """Returns the bytes of all these pages; nothing, and logs why, where the engine gave anything else."""
        group, page_bytes = pages.group, self.config.groups[pages.group].page_bytes
        try:
            pairs = list(zip(pages.pages, given, strict=True))
        except (TypeError, ValueError):
            self._mistakes.tell(f"payloads: of group {group} there is not one of each page; not saved")
            return []
        values: list[memoryview] = []
        for page, one in pairs:
            try:
                values.append(as_bytes(one, page_bytes))
            except TypeError as error:
                self._mistakes.tell(f"payload: of page {page} of group {group} {error}; not saved")
                return []
        return values
