"""Pages that a scan has seen of some ranks, not of all yet: a page can be read when every rank has its part of it."""

from __future__ import annotations

from collections import OrderedDict

from cache_service.core.host.host_key import HostKey

# The most pages of which a scan has seen some rank but not all; of more, the oldest wait for the next scan.
MAX_HALF_SEEN = 262_144


class SeenRanks:
    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, int] = OrderedDict()  # by fingerprint, page hash and group: a bit mask of ranks

    def is_last(self, key: HostKey, num_ranks: int) -> bool:
        """Notes that a scan saw this key. Returns whether the page has been seen of every rank by now."""
        value = key.fingerprint + key.page_hash + key.group.to_bytes(4, "little")
        seen = self._seen.get(value, 0) | 1 << key.rank
        if seen == (1 << num_ranks) - 1:
            self._seen.pop(value, None)
            return True
        self._seen[value] = seen
        if len(self._seen) > MAX_HALF_SEEN:
            self._seen.popitem(last=False)
        return False

    def clear(self) -> None:
        self._seen.clear()
