"""The host tier as SGLang's storage threads use it, by page ids: which pages are there, reading and writing them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from session.words import GroupKind, TransferStatus
from tier_client.client import TierClient
from tier_client.page_store import Buffer
from tier_client.values import Hit, PagePath, PageRange

# Answers whose pages were not asked for yet; the service's leases end by themselves too.
MAX_HITS = 64


class _Found(NamedTuple):
    """A hit whose pages may be asked for, and their ids."""

    ids: tuple[bytes, ...]
    hit: Hit


class StoredPages:
    """One pool's pages: the client's only group, whose kind says which of them a prefix needs.

    Any number of threads may call it.
    """

    def __init__(self, client: TierClient) -> None:
        self._client = client
        (self.group,) = client.config.groups
        # All pages are read from the first on; of a window or a state the last ones.
        self._anchor = 0 if self.group.kind is GroupKind.FULL else -1
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, _Found] = OrderedDict()  # by the first or the last page that is read

    def num_present(self, ids: Sequence[bytes]) -> int:
        """Returns the last page at which a prefix of `ids` can end; its pages stay for a while."""
        hit = self._client.calls.lookup(PagePath(b"".join(ids)), 0) if ids else None
        if hit is None or not hit.lease:
            return 0
        found = _Found(tuple([ids[page] for page in hit.pages[0].pages]), hit)
        anchor = found.ids[self._anchor]
        with self._lock:
            left = [self._found.pop(anchor)] if anchor in self._found else []
            self._found[anchor] = found
            if len(self._found) > MAX_HITS:
                left.append(self._found.popitem(last=False)[1])
        for unused in left:
            self._give_back(unused.hit)
        return hit.usable_pages

    def read(self, ids: Sequence[bytes]) -> list[memoryview]:
        """Returns the leading ones of these pages that are there and right."""
        hit = self._hit_of(ids)
        if hit is None:
            return []
        pages = hit.pages[0]
        first = 0 if self._anchor == 0 else len(pages.pages) - len(ids)
        keys = pages.keys(self._client.config.rank)[first : first + len(ids)]
        got = self._client.store.read(0, keys, self.group.page_bytes)
        is_whole = len(got.values) == len(keys)
        end = hit.usable_pages if is_whole and self._anchor else pages.pages[first] + len(got.values)
        self._client.calls.release(hit, end, got.status)
        if got.status in (TransferStatus.MISSING, TransferStatus.FAILED):
            self._client.calls.suspect_store()
        return got.values

    def _hit_of(self, ids: Sequence[bytes]) -> Hit | None:
        """Returns what `num_present` has found, or finds now, if it has pages for the first of these."""
        hit = self._take_found(ids) or self._client.calls.lookup(PagePath(b"".join(ids)), 0)
        if hit is None or not hit.lease:
            return None
        if self._anchor and len(hit.pages[0].pages) < len(ids):  # it ends earlier, or more than its rule needs is asked
            self._give_back(hit)
            return None
        return hit

    def _take_found(self, ids: Sequence[bytes]) -> Hit | None:
        anchor = ids[self._anchor]
        with self._lock:
            found = self._found.get(anchor)
            if found is None:
                return None
            # Paths that part later begin with the same page.
            pages = found.ids[: len(ids)] if self._anchor == 0 else found.ids[-len(ids) :]
            return self._found.pop(anchor).hit if pages == tuple(ids) else None

    def _give_back(self, hit: Hit) -> None:
        self._client.calls.release(hit, 0, TransferStatus.DONE)

    def write(self, ids: Sequence[bytes], pages: Sequence[Buffer]) -> bool:
        """Returns whether the tier has all of them now."""
        path, ranges = PagePath(b"".join(ids)), [PageRange(0, 0, len(ids))]
        saved = self._client.save_batches(path, ranges, lambda _, wanted: [pages[page] for page in wanted])
        return saved.num_there == len(ids)

    def close(self) -> None:
        self._client.close()
