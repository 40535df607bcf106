"""How much longer a prefix that was used again should live than one used once, learnt from uses and returns.

Knows no node and no queue. A pool that evicts by last use holds what was used within its characteristic time (Che, Tung
and Wang, "Hierarchical Web Caching Systems", 2002). With one such time for each class, T0 for pages used once and T1
for pages used again, a pool holds

    pages used once within T0 + pages used again within T1 = its size

and hits each use that comes within its class's time. Both sums are counted here by age, of evicted pages too: ghosts
tell when one comes back, as in ARC (Megiddo and Modha, 2003). The pair that fits the pool and would have hit the most
decides. T0 = T1 is `lru`; T1 without an end is `slru` without its limit.

Time is counted in stored pages, and ages in sixteenths of the pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate
from math import log2
from typing import NamedTuple

from cache_service.core.ghost_table import AGE_PARTS

# Eight pools: ghosts reach four.
AGES = 128
# Pools of stored pages after which a use counts half.
HALF_LIFE_POOLS = 4
_KEEP_PER_SLOT = 0.5 ** (1 / (AGE_PARTS * HALF_LIFE_POOLS))
# The ratio doubles or halves at most once in an adjustment.
_STEP_OCTAVES = 1.0
# From 64 times on, pages used once go first in any case: 256 times cost 0.4 points of 7.3 at 25,000 pages.
_MOST_OCTAVES = 6.0
PROTECT_ALL = 2.0**40
# The same where that would have hit nearly as much as the best pair: short T0 are blurred, all lie within one slot.
_NEARLY = 0.95


class _Pair(NamedTuple):
    """Lifetimes in slots and the uses that they would have hit."""

    hits: float
    once: int
    again: float


class _Class:
    """Pages by age of their last use, and uses by the age at which they came; newest first."""

    def __init__(self) -> None:
        self.pages: deque[float] = deque([0.0] * AGES, maxlen=AGES)
        self.uses: list[float] = [0.0] * AGES


class Lifetimes:
    """`ratio` is T1 / T0, at least 1; `clock` counts the pages stored."""

    def __init__(self, pool_pages: int) -> None:
        self.clock = 0
        self.ratio = 1.0
        self._pool_pages = pool_pages
        self.unit_pages = max(pool_pages // AGE_PARTS, 1)
        self._octaves = 0.0
        self._classes = (_Class(), _Class())

    def stored(self, is_again: bool, num_pages: int) -> None:
        """Pages entered the pool."""
        before = self.clock // self.unit_pages
        self.clock += num_pages
        slots = self.clock // self.unit_pages - before
        if slots:
            for counts in self._classes:
                counts.pages.extendleft([0.0] * min(slots, AGES))
            if self.clock > self._pool_pages:
                self._adjust(slots)
        self._classes[is_again].pages[0] += num_pages

    def grown(self, is_again: bool, used_at: int, num_pages: int) -> None:
        """More pages of a run whose last use was then."""
        self.stored(is_again, num_pages)
        self._classes[is_again].pages[0] -= num_pages
        self._count(is_again, used_at, num_pages)

    def used(self, is_again: bool, used_at: int, num_pages: int) -> None:
        """Resident pages are used now; `is_again` says of their uses before this one."""
        self.returned(is_again, used_at, num_pages)
        self._classes[True].pages[0] += num_pages

    def returned(self, is_again: bool, used_at: int, num_pages: int) -> None:
        """Evicted pages are used now, and will be stored."""
        age = self._age(used_at)
        self._classes[is_again].uses[min(age, AGES - 1)] += num_pages
        self._count(is_again, used_at, -num_pages)

    def pages(self, is_again: bool) -> float:
        """How many pages of the class are counted."""
        return sum(self._classes[is_again].pages)

    def _age(self, used_at: int) -> int:
        return self.clock // self.unit_pages - used_at // self.unit_pages

    def _count(self, is_again: bool, used_at: int, num_pages: int) -> None:
        age = self._age(used_at)
        if age < AGES:
            self._classes[is_again].pages[age] += num_pages

    def _adjust(self, slots: int) -> None:
        """Move the ratio toward that of the best pair, and let the uses fade."""
        pairs = self._pairs()
        best = max(pairs, key=lambda pair: pair.hits)
        protects_all = best.once <= 1 or best.again >= AGES or pairs[0].hits >= _NEARLY * best.hits
        wanted = _MOST_OCTAVES
        if not protects_all:
            wanted = min(max(log2(max(best.again, 0.25) / best.once), 0.0), _MOST_OCTAVES)
        self._octaves += min(max(wanted - self._octaves, -_STEP_OCTAVES), _STEP_OCTAVES)
        self.ratio = 2.0**self._octaves if self._octaves < _MOST_OCTAVES else PROTECT_ALL
        keep = _KEEP_PER_SLOT**slots
        for counts in self._classes:
            counts.uses = [uses * keep for uses in counts.uses]

    def _pairs(self) -> list[_Pair]:
        """For each lifetime of pages used once, the longest of the others that still fits the pool."""
        once, again = self._classes
        again_pages, again_hits = _sums(again.pages), _sums(again.uses)
        pairs = []
        for time, (pages, hits) in enumerate(zip(_sums(once.pages), _sums(once.uses), strict=True)):
            room = self._pool_pages - pages
            if room < 0:
                break
            slots = bisect_right(again_pages, room) - 1
            part = 0.0
            if slots < AGES:
                part = (room - again_pages[slots]) / (again_pages[slots + 1] - again_pages[slots])
                hits += part * again.uses[slots]
            pairs.append(_Pair(hits + again_hits[slots], time, slots + part))
        return pairs


def _sums(counts: deque[float] | list[float]) -> list[float]:
    """Of the first 0, 1, ... counts. A slot may be a little below 0: the ages of ghosts are not exact."""
    return list(accumulate((max(count, 0.0) for count in counts), initial=0.0))
