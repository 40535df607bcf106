"""Page hash -> host copies of one host tier: rows, their quota and last use, and the breaker.

Knows no tree and no store. A row says which groups of a page the tier holds; rows of different fingerprints never meet.
What the store is to do (keys to delete, keys whose time to live is to be refreshed) is queued here as values.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache_service.core.host_key import HostKey, build_key
from cache_service.core.types import HASH_BYTES, Namespace, PageHash

# Refreshing a key's time to live is best effort; so many may wait.
MAX_TOUCHES = 65_536

# Keys that nobody came to delete die by their time to live.
MAX_DELETES = 1_048_576

# Rows of which a scan has seen some rank but not all; beyond so many the oldest wait for the next scan.
MAX_HALF_SEEN = 262_144


@dataclass(slots=True)
class HostRow:
    """`groups` is a bit mask of the groups present; `namespace` is None where a scan found the row."""

    groups: int
    num_bytes: int
    namespace: Namespace | None
    group_bytes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Breaker:
    """Opens after consecutive failures; asks again after a pause."""

    failures_to_open: int
    pause_ms: int
    failures: int = 0
    open_until_ms: int | None = None

    def failed(self, now_ms: int) -> None:
        self.failures += 1
        if self.failures >= self.failures_to_open:
            self.open_until_ms = now_ms + self.pause_ms

    def succeeded(self) -> None:
        self.failures = 0
        self.open_until_ms = None

    def tick(self, now_ms: int) -> None:
        """After the pause one more failure opens it again."""
        if self.open_until_ms is not None and now_ms >= self.open_until_ms:
            self.open_until_ms = None
            self.failures = self.failures_to_open - 1

    @property
    def is_open(self) -> bool:
        return self.open_until_ms is not None


@dataclass(slots=True)
class HostCounters:
    """What moved, in pages."""

    spilled: int = 0
    fetched: int = 0
    missing: int = 0


class HashIndex:
    """One tier: rows by fingerprint and hash, least recently used first."""

    def __init__(self, quota_bytes: int, breaker: Breaker, shared: bool, key_prefix: bytes) -> None:
        self.quota_bytes, self.breaker, self.shared = quota_bytes, breaker, shared
        self.rows: OrderedDict[bytes, HostRow] = OrderedDict()
        self.num_bytes = 0
        self.pending: dict[bytes, int] = {}  # being spilled: groups on their way
        self.num_ranks: dict[bytes, int] = {}  # by fingerprint
        self.group_bytes: dict[bytes, tuple[int, ...]] = {}  # by fingerprint: bytes of one page of each group
        self.deletes: deque[bytes] = deque(maxlen=MAX_DELETES)
        self.touches: dict[bytes, None] = {}
        self.counters = HostCounters()
        self._key_prefix = key_prefix
        self._seen_ranks: OrderedDict[bytes, int] = OrderedDict()  # scanned rows of which some rank is still to be seen

    def groups(self, fingerprint: bytes, page_hash: bytes) -> int:
        """Groups that can be fetched; none while the breaker is open."""
        if self.breaker.is_open:
            return 0
        row = self.rows.get(fingerprint + page_hash)
        return row.groups if row is not None else 0

    def known(self, fingerprint: bytes, page_hash: bytes) -> int:
        """Groups that are there or on their way."""
        key = fingerprint + page_hash
        row = self.rows.get(key)
        return (row.groups if row is not None else 0) | self.pending.get(key, 0)

    def key_of(self, fingerprint: bytes, group: int, page_hash: bytes, rank: int = 0) -> bytes:
        return build_key(self._key_prefix, HostKey(fingerprint, group, rank, PageHash(page_hash)))

    def begin(self, fingerprint: bytes, page_hash: bytes, groups: int) -> None:
        """A spill of these groups is under way."""
        key = fingerprint + page_hash
        self.pending[key] = self.pending.get(key, 0) | groups

    def end(self, fingerprint: bytes, page_hash: bytes, groups: int) -> None:
        """The spill ended, well or not."""
        key = fingerprint + page_hash
        left = self.pending.get(key, 0) & ~groups
        if left:
            self.pending[key] = left
        else:
            self.pending.pop(key, None)

    def add(self, fingerprint: bytes, page_hash: bytes, groups: int, namespace: Namespace | None) -> None:
        """The tier holds these groups of the page, on every rank; most recently used."""
        key = fingerprint + page_hash
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = HostRow(0, 0, namespace)
        ranks = self.num_ranks.get(fingerprint, 1)
        for group, page_bytes in enumerate(self.group_bytes.get(fingerprint, ())):
            if groups >> group & 1 and not row.groups >> group & 1:
                row.groups |= 1 << group
                row.group_bytes[group] = page_bytes * ranks
                row.num_bytes += page_bytes * ranks
                self.num_bytes += page_bytes * ranks
        row.namespace = row.namespace or namespace
        self.rows.move_to_end(key)

    def adopt(self, key: HostKey) -> bool:
        """A scan saw this key; True when its row becomes visible, which takes every rank."""
        sizes = self.group_bytes.get(key.fingerprint, ())
        ranks = self.num_ranks.get(key.fingerprint, 1)
        if key.group >= len(sizes) or key.rank >= ranks or self.known(key.fingerprint, key.page_hash) >> key.group & 1:
            return False
        seen_key = key.fingerprint + key.page_hash + key.group.to_bytes(4, "little")
        seen = self._seen_ranks.get(seen_key, 0) | 1 << key.rank
        if seen != (1 << ranks) - 1:
            self._seen_ranks[seen_key] = seen
            if len(self._seen_ranks) > MAX_HALF_SEEN:
                self._seen_ranks.popitem(last=False)
            return False
        self._seen_ranks.pop(seen_key, None)
        self.add(key.fingerprint, key.page_hash, 1 << key.group, None)
        return True

    def touch(self, fingerprint: bytes, hashes: Sequence[bytes]) -> None:
        """Tails before heads, so that heads outlive tails."""
        for page_hash in reversed(hashes):
            key = fingerprint + page_hash
            row = self.rows.get(key)
            if row is None:
                continue
            self.rows.move_to_end(key)
            if self.shared and len(self.touches) < MAX_TOUCHES:
                for name in self._names(key, row):
                    self.touches.pop(name, None)
                    self.touches[name] = None

    def forget(self, fingerprint: bytes, page_hash: bytes) -> bool:
        """Drop one row, and its keys."""
        return self._drop(fingerprint + page_hash)

    def shrink(self) -> None:
        """Drop the least recently used rows beyond the quota."""
        while self.num_bytes > self.quota_bytes and self.rows:
            self._drop(next(iter(self.rows)))

    def clear(self, namespace: Namespace | None) -> int:
        """Drop a namespace's rows (None: all); a row of unknown namespace counts as in scope."""
        keys = [key for key, row in self.rows.items() if namespace is None or row.namespace in (None, namespace)]
        for key in keys:
            self._drop(key)
        return len(keys)

    def lose(self) -> None:
        """The store lost everything: forget the rows; there is nothing to delete."""
        self.rows.clear()
        self.touches.clear()
        self.deletes.clear()
        self._seen_ranks.clear()
        self.num_bytes = 0

    def _drop(self, key: bytes) -> bool:
        row = self.rows.pop(key, None)
        if row is None:
            return False
        self.num_bytes -= row.num_bytes
        if self.shared:
            names = self._names(key, row)
            self.deletes += names
            for name in names:
                self.touches.pop(name, None)
        return True

    def _names(self, key: bytes, row: HostRow) -> list[bytes]:
        fingerprint, page_hash = key[:-HASH_BYTES], key[-HASH_BYTES:]
        ranks = range(self.num_ranks.get(fingerprint, 1))
        return [self.key_of(fingerprint, group, page_hash, rank) for group in row.group_bytes for rank in ranks]


@dataclass(frozen=True, slots=True)
class HostView:
    """The host tier as one worker reaches it."""

    index: HashIndex
    fingerprint: bytes
