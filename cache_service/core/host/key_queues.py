"""Rows of one shared store whose keys are to be deleted, and rows whose time to live is to be refreshed.

A row is named by its fingerprint and page hash; it has one key in the store for each group and rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from cache_service.core.host.host_key import key_prefix
from session.words import HASH_BYTES

# The most rows that wait for a refresh of their time to live; refreshing is best effort.
MAX_TOUCHES = 65_536

# The most rows that wait to be deleted. Of more, the oldest are left to their time to live.
MAX_DELETES = 4_194_304


class KeyQueues:
    """Rows wait here until the shell takes them; each is named once among the touches."""

    def __init__(self) -> None:
        self.deletes: deque[tuple[bytes, int]] = deque(maxlen=MAX_DELETES)  # rows, and the groups that went
        self.touches: dict[bytes, None] = {}
        self._prefixes: dict[bytes, list[str]] = {}  # by fingerprint, for each group

    def __len__(self) -> int:
        return len(self.deletes) + len(self.touches)

    def delete(self, row: bytes, groups: int) -> None:
        self.deletes.append((row, groups))

    def touch(self, row: bytes) -> None:
        if row in self.touches or len(self.touches) < MAX_TOUCHES:
            self.touches.pop(row, None)
            self.touches[row] = None

    def untouch(self, row: bytes) -> None:
        self.touches.pop(row, None)

    def clear(self) -> None:
        self.deletes.clear()
        self.touches.clear()

    def take_deletes(self, count: int) -> list[tuple[bytes, int]]:
        """Returns at most `count` rows with the groups that went, those dropped first in front."""
        return [self.deletes.popleft() for _ in range(min(count, len(self.deletes)))]

    def take_touches(self, count: int) -> list[bytes]:
        """Returns at most `count` rows, those touched longest ago in front."""
        taken = list(islice(self.touches, count))
        for row in taken:
            del self.touches[row]
        return taken

    def names(self, row: bytes, groups: int, group_ranks: Sequence[int]) -> list[bytes]:
        """Returns the store's keys of these groups (a bit mask) of a row; `group_ranks`: values of each group."""
        fingerprint, tail = row[:-HASH_BYTES], f":{row[-HASH_BYTES:].hex()}"
        prefixes = self._prefixes.get(fingerprint)
        if prefixes is None:
            prefixes = self._prefixes[fingerprint] = [
                key_prefix(fingerprint, group) for group in range(len(group_ranks))
            ]
        return [
            f"{prefix}{rank}{tail}".encode()
            for group, prefix in enumerate(prefixes)
            if groups >> group & 1
            for rank in range(group_ranks[group])
        ]
