"""The host tiers that workers named: one index for each shared store, one for each worker's private memory.

Everything that a store is to do leaves as keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_service.core.base.manager_config import ManagerConfig
from cache_service.core.base.stats import HostTierStats
from cache_service.core.host.breaker import Breaker
from cache_service.core.host.hash_index import HashIndex, HostView
from cache_service.core.host.host_key import parse_key
from session.messages import Hello
from session.words import GroupSpec, HostTierKind, WorkerId

# A shared tier whose workers are all gone is kept for their return, but not many of them.
MAX_UNUSED_TIERS = 4

# Rows of one tier whose keys are named at once: about 2 ms.
MAX_TAKEN = 2_048


class HostTiers:
    """Shared tiers outlive their workers; a private one dies with its worker.

    `host_tier_id` is Hello.host_tier_id of a SHARED tier.
    """

    def __init__(self, config: ManagerConfig) -> None:
        self._config = config
        self._now_ms = 0
        self.shared: dict[str, HashIndex] = {}
        self.private: dict[WorkerId, HashIndex] = {}

    def view(self, hello: Hello) -> HostView | None:
        """Returns the tier as this worker reaches it; None where it has none."""
        if hello.host_tier is HostTierKind.NONE:
            return None
        if hello.host_tier is HostTierKind.SHARED:
            index = self.shared_index(hello.host_tier_id)
        else:
            index = self.private[hello.worker_id] = self._make(is_shared=False)
        if index.shared and self._config.scans_host_tiers and hello.fingerprint not in index.group_bytes:
            index.unscanned.add(hello.fingerprint)
        return make_view(index, hello.fingerprint, hello.num_ranks, hello.groups)

    def shared_index(self, host_tier_id: str) -> HashIndex:
        """Returns the index of a store that a worker or an attached engine names now."""
        # Last named, last in the order: what is pruned was named longest ago.
        index = self.shared.pop(host_tier_id, None) or self._make(is_shared=True)
        self.shared[host_tier_id] = index
        return index

    def prune(self, in_use: set[str]) -> None:
        """Drops all but a few of the stores that no worker names any more: a flushed one comes back under a new
        identity."""
        unused = [tier_id for tier_id in self.shared if tier_id not in in_use]
        for tier_id in unused[: max(len(unused) - MAX_UNUSED_TIERS, 0)]:
            del self.shared[tier_id]

    def _make(self, is_shared: bool) -> HashIndex:
        config = self._config
        breaker = Breaker(config.breaker_failures, config.breaker_ms)
        index = HashIndex(config.host_quota_bytes, breaker, is_shared)
        index.now_ms = self._now_ms
        return index

    def leave(self, worker_id: WorkerId) -> None:
        for index in self.all():
            index.readers.leave(worker_id)

    def forget_worker(self, worker_id: WorkerId) -> None:
        self.leave(worker_id)
        self.private.pop(worker_id, None)

    def all(self) -> list[HashIndex]:
        return [*self.shared.values(), *self.private.values()]

    def add_scanned(self, host_tier_id: str, fingerprint: bytes, keys: Sequence[bytes]) -> int:
        """Adds rows that a scan found, most recently used first; keys that are not ours are passed over.

        Returns how many became visible.
        """
        index = self.shared.get(host_tier_id)
        if index is None or fingerprint not in index.group_bytes:
            return 0
        num_added = 0
        for raw in keys:
            key = parse_key(raw)
            if key is not None and key.fingerprint == fingerprint:
                num_added += index.add_scanned(key)
        index.shrink()
        return num_added

    def unknown_of(self, host_tier_id: str, keys: Sequence[bytes]) -> list[bytes]:
        """Returns those of these keys that stand for no row, and for no page that is being written."""
        index = self.shared.get(host_tier_id)
        parsed = [(raw, parse_key(raw)) for raw in keys]
        return [
            raw
            for raw, key in parsed
            if index is None or key is None or not index.known(key.fingerprint, key.page_hash) >> key.group & 1
        ]

    def end_scan(self, host_tier_id: str, fingerprint: bytes) -> None:
        """Notes that no scan of these rows is under way or due."""
        index = self.shared.get(host_tier_id)
        if index is not None:
            index.unscanned.discard(fingerprint)

    def report_failure(self, host_tier_id: str, now_ms: int) -> None:
        index = self.shared.get(host_tier_id)
        if index is not None:
            index.breaker.failed(now_ms)

    def report_ok(self, host_tier_id: str) -> None:
        index = self.shared.get(host_tier_id)
        if index is not None:
            index.breaker.succeeded()

    def tick(self, now_ms: int) -> None:
        self._now_ms = now_ms
        for index in self.all():
            index.readers.tick(now_ms)
            index.now_ms = now_ms
            index.expire(now_ms - self._config.host_ttl_ms, MAX_TAKEN)

    def named(self) -> tuple[tuple[str, bytes], ...]:
        """Returns (host_tier_id, fingerprint) of every shared tier that a worker or an engine named."""
        shared = self.shared.items()
        return tuple((tier_id, fingerprint) for tier_id, index in shared for fingerprint in index.group_bytes)

    def num_deletes(self) -> int:
        """Returns how many rows have keys that wait to be taken for deletion."""
        return sum(len(index.queues.deletes) for index in self.shared.values())

    def has_work(self) -> bool:
        return any(index.queues for index in self.all())

    def take_deletes(self) -> tuple[bytes, ...]:
        """Returns keys to unlink."""
        return tuple(name for index in self.all() for name in index.take_deletes(MAX_TAKEN))

    def take_touches(self) -> tuple[bytes, ...]:
        """Returns keys whose time to live is to be refreshed, tails before heads."""
        return tuple(name for index in self.all() for name in index.take_touches(MAX_TAKEN))

    def stats(self) -> HostTierStats:
        tiers = self.all()
        return HostTierStats(
            num_rows=sum(len(index.rows) for index in tiers),
            num_bytes=sum(index.quota.num_bytes for index in tiers),
            quota_bytes=self._config.host_quota_bytes,
            num_spilled_pages=sum(index.counters.spilled for index in tiers),
            num_fetched_pages=sum(index.counters.fetched for index in tiers),
            num_missing_pages=sum(index.counters.missing for index in tiers),
            num_corrupt_pages=sum(index.counters.corrupt for index in tiers),
            breaker_open=any(index.breaker.is_open for index in tiers),
            spill_policy=self._config.spill,
            fetch_policy=self._config.fetch,
        )


def make_view(index: HashIndex, fingerprint: bytes, num_ranks: int, groups: Sequence[GroupSpec]) -> HostView:
    """Returns the tier as readers and writers of pages of this fingerprint see it."""
    index.group_ranks[fingerprint] = tuple([1 if spec.replicated else num_ranks for spec in groups])
    index.group_bytes[fingerprint] = tuple(spec.page_bytes for spec in groups)
    return HostView(index, fingerprint)
