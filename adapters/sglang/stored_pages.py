"""What SGLang's storage threads ask of the host tier by page ids: which are there, their bytes, to keep new ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from adapters.sglang.saving import save_pages
from session.words import TransferStatus
from tier_client.client import TierClient
from tier_client.page_store import Buffer
from tier_client.values import Hit, PagePath

# Answers whose pages nobody has asked for yet; the service's leases end by themselves too.
MAX_HITS = 64


class StoredPages:
    """Any number of threads may call it."""

    def __init__(self, client: TierClient, page_bytes: int) -> None:
        self._client, self._page_bytes = client, page_bytes
        self._lock = threading.Lock()
        self._hits: OrderedDict[bytes, Hit] = OrderedDict()  # by the first page

    def num_present(self, ids: Sequence[bytes]) -> int:
        """Returns how many of the first pages are there; they stay for a while."""
        hit = self._client.calls.lookup(PagePath(b"".join(ids)), 0)
        if hit is None or not hit.lease:
            return 0
        with self._lock:
            left = [self._hits.pop(ids[0])] if ids[0] in self._hits else []
            self._hits[ids[0]] = hit
            if len(self._hits) > MAX_HITS:
                left.append(self._hits.popitem(last=False)[1])
        for unused in left:
            self._client.calls.release(unused, 0, TransferStatus.DONE)
        return hit.usable_pages

    def read(self, ids: Sequence[bytes]) -> list[memoryview]:
        """Returns the leading pages that are there and right."""
        with self._lock:
            hit = self._hits.pop(ids[0], None)
        if hit is None or hit.usable_pages < len(ids):
            if hit is not None:
                self._client.calls.release(hit, 0, TransferStatus.DONE)
            hit = self._client.calls.lookup(PagePath(b"".join(ids)), 0)
        if hit is None or not hit.lease:
            return []
        keys = hit.pages[0].keys(self._client.config.rank)[: len(ids)]
        got = self._client.store.read(0, keys, self._page_bytes)
        self._client.calls.release(hit, len(got.values), got.status)
        if got.status in (TransferStatus.MISSING, TransferStatus.FAILED):
            self._client.calls.suspect_store()
        return got.values

    def write(self, ids: Sequence[bytes], pages: Sequence[Buffer]) -> bool:
        """Returns whether the tier has all of them now."""
        return save_pages(self._client, ids, lambda wanted: [pages[page] for page in wanted]) == len(ids)
