"""Page hash -> host copies of one host tier: rows, and their order by last use. Their bytes count in quota.py.

A row says which groups of a page the tier holds; rows of different fingerprints never meet. Leases of attached engines
hold rows: these go neither by the quota nor by age.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache_service.core.host.breaker import Breaker
from cache_service.core.host.cleared_namespaces import NOTHING_HIDDEN, ClearedNamespaces
from cache_service.core.host.host_key import HostKey
from cache_service.core.host.key_queues import KeyQueues
from cache_service.core.host.quota import Quota
from cache_service.core.host.readers import Readers
from cache_service.core.host.seen_ranks import SeenRanks
from session.words import HASH_BYTES, MissReason, Namespace


@dataclass(slots=True)
class HostRow:
    """`groups` is a bit mask of the groups present; `namespace` is None where a scan found the row.

    `stamp` numbers the additions, and is 0 where a scan found the row. A Clear call hides the rows up to its number.
    """

    groups: int
    num_bytes: int
    namespace: Namespace | None
    stamp: int
    used_ms: int = 0
    holds: int = 0  # leases


class DropListener(ABC):
    """Is told of each row that goes, while the store goes on."""

    @abstractmethod
    def dropped(self, key: bytes, groups: int, why: MissReason) -> None:
        """`key`: fingerprint and page hash; `groups`: a bit mask of those that it had."""


@dataclass(slots=True)
class HostCounters:
    """What moved, in pages."""

    spilled: int = 0
    fetched: int = 0
    missing: int = 0
    corrupt: int = 0


class HashIndex:
    """One tier: rows by fingerprint and hash, least recently used first."""

    def __init__(self, quota_bytes: int, breaker: Breaker, shared: bool) -> None:
        self.quota, self.breaker, self.shared = Quota(quota_bytes), breaker, shared
        self.readers = Readers(breaker)
        self.rows: OrderedDict[bytes, HostRow] = OrderedDict()
        self.pending: dict[bytes, int] = {}  # being spilled: groups on their way
        self._passed_over: dict[bytes, int] = {}  # of those: groups whose delete was left to what is being spilled
        self.group_ranks: dict[bytes, tuple[int, ...]] = {}  # by fingerprint: values of one page of each group
        self.group_bytes: dict[bytes, tuple[int, ...]] = {}  # by fingerprint: bytes of one page of each group
        self.unscanned: set[bytes] = set()  # fingerprints whose rows a scan is yet to find
        self.queues = KeyQueues()  # empty unless the tier is shared
        self.cleared = ClearedNamespaces()
        self.counters = HostCounters()
        self.drop_listener: DropListener | None = None
        self.now_ms = 0  # of the last tick
        self._stamp = 0
        self._seen_ranks = SeenRanks()

    def stored(self, fingerprint: bytes, page_hash: bytes, floor: int = NOTHING_HIDDEN) -> int:
        """Returns the groups that the store is known to have, also while it fails."""
        row = self.rows.get(fingerprint + page_hash)
        return row.groups if row is not None and row.stamp > floor else 0

    def leading(self, fingerprint: bytes, hashes: Sequence[bytes], mask: int, floor: int = NOTHING_HIDDEN) -> int:
        """Returns how many of these pages, from the first on, are there with all groups of the mask."""
        keys = [fingerprint + page_hash for page_hash in hashes]
        for count, row in enumerate(map(self.rows.get, keys)):
            if row is None or row.stamp <= floor:
                return count
            groups = row.groups
            if not groups or groups & mask != mask:
                return count
        return len(hashes)

    def known(self, fingerprint: bytes, page_hash: bytes, floor: int = NOTHING_HIDDEN) -> int:
        """Returns the groups that are there or being spilled."""
        return self.stored(fingerprint, page_hash, floor) | self.pending.get(fingerprint + page_hash, 0)

    def begin(self, fingerprint: bytes, page_hash: bytes, groups: int) -> None:
        """Notes that these groups are being spilled."""
        key = fingerprint + page_hash
        self.pending[key] = self.pending.get(key, 0) | groups

    def end(self, fingerprint: bytes, page_hash: bytes, groups: int) -> None:
        """Notes that their spill has ended, well or not."""
        for noted in (self.pending, self._passed_over):
            _remove(noted, fingerprint + page_hash, groups)

    def end_unwritten(self, fingerprint: bytes, page_hash: bytes, groups: int) -> None:
        """Notes that their spill has ended before anything was written. Deletes that were left to it go out now."""
        deletes = self._passed_over.get(fingerprint + page_hash, 0) & groups
        self.end(fingerprint, page_hash, groups)
        if deletes:
            self.delete(fingerprint, page_hash, deletes)

    def hide(self, digest: bytes | None) -> int:
        """Hides every row of now from a namespace (None: from all). Returns the highest stamp that is hidden."""
        floor = self.cleared.hide(digest, self._stamp)
        if floor != NOTHING_HIDDEN:
            # What the forgotten namespace could find again goes for all.
            for key in [k for k, row in self.rows.items() if row.namespace is None and row.stamp <= floor]:
                self._drop(key)
        return self._stamp

    def drop_hidden(self, key: bytes, namespace: Namespace | None, floor: int) -> bool:
        """Drops a row that is known to be of the namespace (None: of any) and hidden. Returns whether it was."""
        row = self.rows.get(key)
        if row is None or row.stamp > floor or (namespace is not None and row.namespace != namespace):
            return False
        return self._drop(key, MissReason.CLEARED)

    def all_keys(self) -> list[bytes]:
        """Returns the keys of all rows, in no order: that takes 3 ms for 300,000 rows, in their order 100."""
        return list(dict.__iter__(self.rows))

    def hidden_first(self, floor: int) -> Iterator[bytes]:
        """Yields keys of rows up to that stamp; the caller drops each before it asks for the next. Rows written since
        stand behind them."""
        while True:
            key = next(iter(self.rows), None)
            if key is None or self.rows[key].stamp > floor:
                return
            yield key

    def is_unknown(self, key: bytes) -> bool:
        """Returns whether there is such a row, and of an unknown namespace."""
        row = self.rows.get(key)
        return row is not None and row.namespace is None

    def add(self, fingerprint: bytes, page_hash: bytes, groups: int, namespace: Namespace | None) -> None:
        """The tier holds these groups of the page, on every rank; most recently used."""
        key = fingerprint + page_hash
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = HostRow(0, 0, namespace, 0)
        if namespace is not None:  # written now; what a scan found may have been written before any Clear call
            self._stamp += 1
            row.stamp = self._stamp
        added = groups & ~row.groups & (1 << len(self.group_bytes.get(fingerprint, ()))) - 1
        num_bytes = self.page_bytes(fingerprint, added)
        row.groups |= added
        row.num_bytes += num_bytes
        self.quota.grow(num_bytes, is_held=row.holds > 0)
        row.namespace = row.namespace or namespace
        self._use(key, row)

    def page_bytes(self, fingerprint: bytes, groups: int) -> int:
        """Returns the bytes of a page of these groups (a bit mask) on all ranks that have a value of their own."""
        sizes, ranks = self.group_bytes.get(fingerprint, ()), self.group_ranks.get(fingerprint, ())
        return sum([size * num for group, (size, num) in enumerate(zip(sizes, ranks)) if groups >> group & 1])  # noqa: B905

    def add_scanned(self, key: HostKey) -> bool:
        """Adds the row of a key that a scan found, after those that were used later: it is the least recently used.

        Returns whether the row becomes visible, which takes every rank's key.
        """
        group_ranks = self.group_ranks.get(key.fingerprint, ())
        if key.group >= len(group_ranks) or self.known(key.fingerprint, key.page_hash) >> key.group & 1:
            return False
        num_ranks = group_ranks[key.group]
        if key.rank >= num_ranks or not self._seen_ranks.is_last(key, num_ranks):
            return False
        if self.cleared.are_all:
            self.delete(key.fingerprint, key.page_hash, 1 << key.group)
            return False
        is_new = key.fingerprint + key.page_hash not in self.rows
        self.add(key.fingerprint, key.page_hash, 1 << key.group, None)
        if is_new:  # what was used since the restart is younger than all that is found
            self.rows.move_to_end(key.fingerprint + key.page_hash, last=False)
        return True

    def touch(self, fingerprint: bytes, hashes: Sequence[bytes], *, in_store: bool = True) -> None:
        """Tails before heads, so that heads outlive tails. Without `in_store` their times to live stay as they are."""
        for page_hash in reversed(hashes):
            key = fingerprint + page_hash
            row = self.rows.get(key)
            if row is None:
                continue
            if not in_store:
                self.rows.move_to_end(key)
                continue
            self._use(key, row)
            if self.shared:
                self.queues.touch(key)

    def forget(self, fingerprint: bytes, page_hash: bytes, why: MissReason) -> bool:
        """Drops one row, and its keys."""
        return self._drop(fingerprint + page_hash, why)

    def delete(self, fingerprint: bytes, page_hash: bytes, groups: int) -> None:
        """Deletes keys that stand for no row."""
        if self.shared:
            self.queues.delete(fingerprint + page_hash, groups)

    def _use(self, key: bytes, row: HostRow) -> None:
        row.used_ms = self.now_ms
        self.rows.move_to_end(key)

    def hold(self, key: bytes) -> HostRow:
        """Notes that a lease holds this row, which is there, and has just used it. Returns it, for `let_go`."""
        row = self.rows[key]
        if not row.holds:
            self.quota.hold(row.num_bytes)
        row.holds += 1
        return row

    def let_go(self, key: bytes, row: HostRow) -> None:
        """Ends a hold; the row may have gone meanwhile."""
        row.holds -= 1
        if not row.holds and self.rows.get(key) is row:
            self.quota.let_go(row.num_bytes)

    def _oldest(self) -> bytes | None:
        """Returns the least recently used row that no lease holds. Held ones before it are in use now."""
        while len(self.rows) > self.quota.num_held:
            key = next(iter(self.rows))
            row = self.rows[key]
            if not row.holds:
                return key
            self._use(key, row)
        return None

    def expire(self, before_ms: int, most: int) -> None:
        """Drops at most `most` rows that were last used before that: a shared store's time to live has ended them."""
        for _ in range(most if self.shared else 0):
            key = self._oldest()
            if key is None or self.rows[key].used_ms >= before_ms:
                return
            self._drop(key)

    def shrink(self) -> None:
        """Drops the least recently used rows beyond the quota, but none that a lease holds."""
        while self.quota.is_exceeded:
            key = self._oldest()
            if key is None:
                return
            self._drop(key)

    def lose(self) -> None:
        """The store lost everything: forget the rows; there is nothing to delete."""
        self.rows.clear()
        self.queues.clear()
        self._passed_over.clear()
        self._seen_ranks.clear()
        self.cleared.clear()
        self.quota.clear()

    def _drop(self, key: bytes, why: MissReason = MissReason.EVICTED) -> bool:
        row = self.rows.pop(key, None)
        if row is None:
            return False
        self.quota.drop(row.num_bytes, is_held=row.holds > 0)
        if self.drop_listener is not None:
            self.drop_listener.dropped(key, row.groups, why)
        if self.shared:
            self.queues.delete(key, row.groups)
            self.queues.untouch(key)
        return True

    def take_deletes(self, count: int) -> list[bytes]:
        """Returns keys to unlink, of at most `count` rows; those dropped first come first."""
        names: list[bytes] = []
        for key, groups in self.queues.take_deletes(count):
            # A row that came back meanwhile has been written anew, or is about to be.
            row = self.rows.get(key)
            groups &= ~(row.groups if row is not None else 0)
            coming = groups & self.pending.get(key, 0)
            if coming:
                self._passed_over[key] = self._passed_over.get(key, 0) | coming
            names += self._names(key, groups & ~coming)
        return names

    def take_touches(self, count: int) -> list[bytes]:
        """Returns keys whose time to live is to be refreshed, of at most `count` rows."""
        return [name for key in self.queues.take_touches(count) for name in self._names(key, self.rows[key].groups)]

    def _names(self, key: bytes, groups: int) -> list[bytes]:
        fingerprint = key[:-HASH_BYTES]
        return self.queues.names(key, groups, self.group_ranks.get(fingerprint, ()))


def _remove(noted: dict[bytes, int], key: bytes, groups: int) -> None:
    left = noted.get(key, 0) & ~groups
    if left:
        noted[key] = left
    else:
        noted.pop(key, None)


@dataclass(frozen=True, slots=True)
class HostView:
    """The host tier as one worker reaches it."""

    index: HashIndex
    fingerprint: bytes
