"""A slow, plain model of one worker's cache: which prefixes are resident in which group, who holds them, what
must happen next.

There is no tree, node or order here: prefixes are tuples in dicts, counts are recounted each time. It learns what
became findable and what went from the events, and judges each of them by the laws; everything else it predicts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from cache_service.core.base.types import Cleared, Event, Removed, Stored
from session.words import GroupKind, Namespace
from tests.core.driver import FakeWorker
from tests.core.tree_view import Path, check_contents, node_ends, standing
from tests.core.world import Live


class Forecast(NamedTuple):
    """What an acquire should answer. `room` is whether the best boundary fits."""

    matched: int
    usable: int
    room: bool
    fits_empty: bool
    need: tuple[int, ...]


class Oracle:
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.size = worker.page_tokens
        self.specs = worker.groups
        self.resident: list[dict[Path, None]] = [{} for _ in worker.groups]
        self.path_of_hash: dict[bytes, Path] = {}
        self.hash_of_path: dict[Path, bytes] = {}
        self.removed: list[list[Path]] = [[] for _ in worker.groups]
        self.view: list[dict[Path, int]] = [{} for _ in worker.groups]
        self.stamps: dict[Path, int] = {}
        self.bared: dict[Path, int] = {}  # when what stood behind a node was evicted last
        self.ends: set[Path] = set()
        self.clock = 0
        worker.world.listeners.append(self.hear)

    # -- events ------------------------------------------------------------------------------------------------

    def hear(self, events: Sequence[Event]) -> None:
        self.removed = [[] for _ in self.specs]
        if not self.worker.connected:
            return
        for event in events:
            if isinstance(event, Stored) and event.worker_id == self.worker.id:
                self._stored(event)
            elif isinstance(event, Removed) and event.worker_id == self.worker.id:
                self._removed(event)
            elif isinstance(event, Cleared) and event.worker_id in (None, self.worker.id):
                self.forget()
        self._look()
        self._closed()

    def _look(self) -> None:
        """FULL pages are told by events and must be those that stand; of other groups no event tells."""
        view = standing(self.worker.world.manager, self.worker.id, len(self.specs))
        for group, spec in enumerate(self.specs):
            if spec.kind == GroupKind.FULL:
                assert set(self.resident[group]) == set(view[group]), f"events and tree differ in group {group}"
            else:
                self.resident[group] = dict.fromkeys(view[group])
        self.view = view
        self.ends = node_ends(self.worker.world.manager, self.worker.id)

    def _stored(self, event: Stored) -> None:
        tokens = tuple(array("i", event.tokens))
        assert len(tokens) == len(event.page_hashes) * self.size
        prefix = self.path_of_hash[event.parent_hash][1] if event.parent_hash else ()
        for i, page_hash in enumerate(event.page_hashes):
            path = (event.namespace, prefix + tokens[: (i + 1) * self.size])
            assert self.path_of_hash.setdefault(page_hash, path) == path, "one hash, two prefixes"
            assert self.hash_of_path.setdefault(path, page_hash) == page_hash, "one prefix, two hashes"
            if self.specs[event.group].kind == GroupKind.FULL:
                assert path not in self.resident[event.group], "stored twice"
                self.resident[event.group][path] = None

    def _removed(self, event: Removed) -> None:
        for page_hash in event.page_hashes:
            path = self.path_of_hash[page_hash]
            if self.specs[event.group].kind != GroupKind.FULL:
                continue  # without a FULL group events tell of places, which may be holes
            assert path in self.resident[event.group], "removed what was not there"
            del self.resident[event.group][path]
            self.removed[event.group].append(path)
            parent = (path[0], path[1][: -self.size])
            if parent in self.ends:
                self.bared[parent] = self.clock

    def forget(self) -> None:
        """The device is empty for the manager. Hashes keep their meaning for ever."""
        for pages in self.resident:
            pages.clear()

    def _closed(self) -> None:
        """No page outlives its parent in a FULL group, and nothing stands where the FULL page is gone."""
        fulls = [g for g, spec in enumerate(self.specs) if spec.kind == GroupKind.FULL]
        for group, pages in enumerate(self.resident):
            for namespace, prefix in pages:
                if group in fulls:
                    parent = (namespace, prefix[: -self.size])
                    assert not parent[1] or parent in pages, "a page outlived its parent"
                for full in fulls:
                    assert (namespace, prefix) in self.resident[full], "a page without its FULL page"

    # -- forecasts ---------------------------------------------------------------------------------------------

    def has(self, group: int, namespace: Namespace, tokens: Sequence[int], end: int) -> bool:
        return (namespace, tuple(tokens[:end])) in self.resident[group]

    def can_resume(self, group: int, namespace: Namespace, tokens: Sequence[int], at: int) -> bool:
        spec, size = self.specs[group], self.size
        if spec.kind == GroupKind.FULL:
            first = 0
        elif spec.kind == GroupKind.WINDOW:
            first = max(0, at - (spec.window_tokens - 1)) // size * size if spec.window_tokens > 1 else at
        else:
            return at == 0 or self.has(group, namespace, tokens, at)
        return all(self.has(group, namespace, tokens, end) for end in range(first + size, at + 1, size))

    def limit(self, tokens: Sequence[int]) -> int:
        return (len(tokens) - 1) // self.size * self.size

    def usable(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """The largest boundary at which every group can resume."""
        for at in range(self.limit(tokens), 0, -self.size):
            if all(self.can_resume(g, namespace, tokens, at) for g in range(len(self.specs))):
                return at
        return 0

    def matched(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """Tokens below the limit whose pages every FULL group has."""
        fulls = [g for g, spec in enumerate(self.specs) if spec.kind == GroupKind.FULL]
        for at in range(self.limit(tokens), 0, -self.size):
            if all(self.can_resume(g, namespace, tokens, at) for g in fulls):
                return at
        return 0

    def forecast(
        self, namespace: Namespace, tokens: Sequence[int], chunk: int, reserve: int, bypass: bool = False
    ) -> Forecast:
        usable = 0 if bypass else self.usable(namespace, tokens)
        need = self.need(tokens, usable, chunk)
        room = True
        for group, spec in enumerate(self.specs):
            hits = self.hits(group, namespace, tokens, usable)
            spare = self.num_free(group) + len(self.evictable(group) - hits)
            room &= need[group] + (reserve if spec.kind == GroupKind.FULL else 0) <= spare
        empty = self.need(tokens, 0, chunk)
        fits = all(
            n + (reserve if spec.kind == GroupKind.FULL else 0) <= spec.num_pages
            for n, spec in zip(empty, self.specs, strict=True)
        )
        matched = 0 if bypass else self.matched(namespace, tokens)
        return Forecast(matched, usable, room, fits, need)

    def need(self, tokens: Sequence[int], usable: int, chunk: int) -> tuple[int, ...]:
        """Fresh pages that the first launch cannot do without."""
        end = min(len(tokens), usable + chunk) if chunk else len(tokens)
        whole, first = -(-len(tokens) // self.size), usable // self.size
        of_kind = {
            GroupKind.FULL: whole - first,
            GroupKind.WINDOW: -(-end // self.size) - first,
            GroupKind.STATE: 1,
        }
        return tuple(of_kind[spec.kind] for spec in self.specs)

    def hits(self, group: int, namespace: Namespace, tokens: Sequence[int], at: int) -> set[Path]:
        """The resident pages that a lease which starts at `at` reads."""
        spec, size = self.specs[group], self.size
        first = 0
        if spec.kind == GroupKind.WINDOW:
            first = max(0, at - (spec.window_tokens - 1)) // size * size if spec.window_tokens > 1 else at
        if spec.kind == GroupKind.STATE:
            first = at - size if at else 0
        return {(namespace, tuple(tokens[:end])) for end in range(first + size, at + 1, size)}

    # -- counts ------------------------------------------------------------------------------------------------

    def held(self, group: int) -> set[Path]:
        """Resident pages that some lease pins or reads."""
        pinned: set[Path] = set()
        for live in self.worker.live.values():
            if live.bypass:
                continue
            at = live.reported // self.size * self.size
            if self.specs[group].kind == GroupKind.STATE:
                if live.reported == live.grant.usable_tokens and live.grant.restore:
                    pinned |= self.hits(group, live.namespace, live.tokens, at)
            elif self.specs[group].kind == GroupKind.WINDOW:
                pinned |= self._window_reads(group, live)
            else:
                pinned |= self.hits(group, live.namespace, live.tokens, at)
        return pinned & set(self.resident[group])

    def _window_reads(self, group: int, live: Live) -> set[Path]:
        size, reach = self.size, self.specs[group].window_tokens - 1
        first = max(0, live.reported - reach) // size * size if reach else live.reported
        reads = {(live.namespace, tuple(live.tokens[:end])) for end in range(first + size, live.reported + 1, size)}
        return reads - self._adopted_twins(group, live)

    def _adopted_twins(self, group: int, live: Live) -> set[Path]:
        """Window pages of an adopted sequence stay its own where the tree has another page, or a hole."""
        if not live.adopted:
            return set()
        spec, size = self.specs[group], self.size
        first = max(0, live.reported - (spec.window_tokens - 1)) // size
        numbers = range(first, live.reported // size)
        paths = {number: (live.namespace, tuple(live.tokens[: (number + 1) * size])) for number in numbers}
        own = live.tables[group]
        return {path for number, path in paths.items() if self.view[group].get(path) != own.get(number)}

    def evictable(self, group: int) -> set[Path]:
        return set(self.resident[group]) - self.held(group)

    def private(self, group: int) -> int:
        """Pages that live sequences hold beyond what they published."""
        total = 0
        for live in self.worker.live.values():
            if self.specs[group].kind == GroupKind.STATE:
                total += (group in live.working) + (group in live.rolling)
                total += sum(1 for g, boundary in live.snapshots if g == group and boundary > live.reported)
            elif live.bypass:
                total += sum(1 for number in live.tables[group] if number >= self._first_held(group, live))
            else:
                total += sum(1 for number in live.tables[group] if number >= live.reported // self.size)
                if self.specs[group].kind == GroupKind.WINDOW:
                    total += len(self._adopted_twins(group, live))
        return total

    def _first_held(self, group: int, live: Live) -> int:
        """The first page that a lease holds which bypasses the cache."""
        if self.specs[group].kind == GroupKind.FULL:
            return 0
        return max(0, live.reported - (self.specs[group].window_tokens - 1)) // self.size

    def num_free(self, group: int) -> int:
        return (
            self.specs[group].num_pages - len(self.resident[group]) - self.private(group) - self.worker.orphaned(group)
        )

    def blurred(self) -> bool:
        """A fetch holds pages of WINDOW and STATE groups that only its manager can tell from hits."""
        waits = self.worker.orphans or any(live.fetch for live in self.worker.live.values())
        return bool(waits) and any(spec.kind != GroupKind.FULL for spec in self.specs)

    def check(self) -> None:
        """The manager's counts are the ones counted here."""
        states = {group for group, spec in enumerate(self.specs) if spec.kind == GroupKind.STATE}
        check_contents(self.view, self.worker.shadow, states)
        (stats,) = [w for w in self.worker.world.manager.stats().workers if w.worker_id == self.worker.id]
        assert stats.num_leases == len(self.worker.live)
        for group, counted in enumerate(stats.groups):
            if self.blurred():
                break
            assert counted.num_free == self.num_free(group), f"free pages of group {group}"
            if not self.worker.spills:
                assert counted.num_evictable == len(self.evictable(group)), f"evictable pages of group {group}"
        for live in self.worker.live.values():
            if not live.bypass:
                self._check_published(live)

    def _check_published(self, live: Live) -> None:
        """Whatever was reported is resident in every FULL group: the lease pins it."""
        at = live.reported // self.size * self.size
        for group, spec in enumerate(self.specs):
            if spec.kind == GroupKind.FULL:
                assert self.can_resume(group, live.namespace, live.tokens, at), "a pinned page went"
            elif spec.kind == GroupKind.WINDOW and live.reported > live.grant.usable_tokens:
                assert self._window_reads(group, live) <= set(self.resident[group]), "a page that is still read went"

    # -- recency -----------------------------------------------------------------------------------------------

    def used(self, live: Live) -> None:
        """A lease ends here: all that it covered was used now."""
        if live.bypass:
            return
        self.clock += 1
        for end in range(self.size, live.reported + 1, self.size):
            self.stamps[live.namespace, tuple(live.tokens[:end])] = self.clock

    def leaves(self) -> set[Path]:
        """Resident FULL pages that nobody holds and nothing stands behind."""
        pages = set(self.resident[0])
        parents = {(namespace, prefix[: -self.size]) for namespace, prefix in pages}
        return (pages - parents) - self.held(0)

    def judge_evictions(self, leaves: set[Path]) -> None:
        """LRU: of the leaves before the call, none that stayed is older than one that went.

        A node that an eviction made a leaf counts as just used: its pages are as old as that, or as their last use.
        """
        gone = {path for path in self.removed[0] if path in leaves}
        stayed = leaves & set(self.resident[0]) - self.held(0)
        if gone and stayed:
            newest = max(self.stamps.get(p, 0) for p in gone)
            oldest = min(max(self.stamps.get(p, 0), self.bared.get(p, 0)) for p in stayed)
            assert newest <= oldest, "a younger leaf went before an older one"
