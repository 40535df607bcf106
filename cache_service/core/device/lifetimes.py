"""How much longer a prefix that was used again should live than one used once, learnt from uses and returns.

A pool that evicts by last use holds what was used within its characteristic time (Che, Tung and Wang, "Hierarchical Web
Caching Systems", 2002). With one such time for each class, T0 for pages used once and T1 for pages used again, a pool
holds

    pages used once within T0 + pages used again within T1 = its size

and hits each use that comes within its class's time. Both sums are counted here by age, of evicted pages too: ghosts
tell when one comes back, as in ARC (Megiddo and Modha, 2003). The pair that fits the pool and would have hit the most
decides. T1 without an end is `slru` without its limit.

A queue does not know these times, only how long ago a node became a leaf. Trunks become leaves when their last child
has gone, and pages used again are mostly trunks: where one queue orders both, as in `lru`, they live about twice as
long after their last use as pages used once do (measured: 24 and 12 sixteenths of the pool). So T1 / T0 is twice the
ratio of the ages that the queues allow, and pairs below that cannot be had.

Time is counted in stored pages, and ages in sixteenths of the pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate
from math import log2
from typing import NamedTuple

from cache_service.core.device.ghost_table import AGE_PARTS

# Eight pools: ghosts reach four.
AGES = 128
# Pools of stored pages after which a use counts half.
HALF_LIFE_POOLS = 4
_KEEP_PER_UNIT = 0.5 ** (1 / (AGE_PARTS * HALF_LIFE_POOLS))
# An adjustment takes 60 us and a unit of 25,000 pages two requests, so it waits for some units.
_ADJUST_UNITS = 4
# Before the pool was filled twice the uses say little: most ages are yet to be reached.
_FIRST_POOLS = 2
# How far the ratio moves toward the wanted one in a unit. A ratio that jumps drops what it kept before it is used: of
# the synthetic trace's tokens 20.4 % hit at 100,000 pages, with any fixed ratio 21.0 to 21.9 %.
_PART_PER_UNIT = 1 / 8
# T1 / T0 where both queues are one.
_TRUNK_RATIO = 2.0
# From 64 times on, pages used once go first in any case: 256 times cost 0.4 points of 7.3 at 25,000 pages.
_MOST_OCTAVES = 6.0
_BEYOND_MOST = 6.5  # what is wanted then, so that the most is reached
PROTECT_ALL = 2.0**40
# Also protect all where the shortest T0 reaches 95 % of the best pair's hits: T0 below one unit cannot be told apart.
_NEARLY = 0.95


class _Pair(NamedTuple):
    """Lifetimes in units and the uses that they would have hit."""

    hits: float
    once: int
    again: float


class _Class:
    """Pages by age of their last use, and uses by the age at which they came; newest first."""

    def __init__(self) -> None:
        self.pages: deque[float] = deque([0.0] * AGES, maxlen=AGES)
        self.uses: list[float] = [0.0] * AGES


class Lifetimes:
    """`ratio` is how much older leaves used again may get than those used once, at least 1; `clock` counts the pages
    stored.
    """

    def __init__(self, pool_pages: int) -> None:
        self.clock = 0
        self._units = 0  # since the last adjustment
        self.ratio = 1.0
        self._pool_pages = pool_pages
        self.unit_pages = max(pool_pages // AGE_PARTS, 1)
        self._octaves = 0.0
        self._classes = (_Class(), _Class())

    def stored(self, is_again: bool, num_pages: int) -> None:
        """Pages entered the pool."""
        before = self.clock // self.unit_pages
        self.clock += num_pages
        units = self.clock // self.unit_pages - before
        if units:
            for counts in self._classes:
                counts.pages.extendleft([0.0] * min(units, AGES))
            self._units += units
            if self._units >= _ADJUST_UNITS and self.clock > _FIRST_POOLS * self._pool_pages:
                self._adjust()
        self._classes[is_again].pages[0] += num_pages

    def grown(self, is_again: bool, used_at: int, num_pages: int) -> None:
        """A run whose last use was at `used_at` got more pages."""
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
        """Returns how many pages of the class are counted."""
        return sum(self._classes[is_again].pages)

    def _age(self, used_at: int) -> int:
        return self.clock // self.unit_pages - used_at // self.unit_pages

    def _count(self, is_again: bool, used_at: int, num_pages: int) -> None:
        age = self._age(used_at)
        if age < AGES:
            self._classes[is_again].pages[age] += num_pages

    def _adjust(self) -> None:
        """Moves the ratio toward that of the best pair, and lets the uses fade."""
        pairs = self._pairs()
        best = max(pairs, key=lambda pair: pair.hits)
        wanted = _BEYOND_MOST
        if best.once > 1 and best.again < AGES and pairs[0].hits < _NEARLY * best.hits:
            wanted = min(log2(best.again / best.once / _TRUNK_RATIO), _BEYOND_MOST)
        self._octaves += (wanted - self._octaves) * (1 - (1 - _PART_PER_UNIT) ** self._units)
        self.ratio = 2.0**self._octaves if self._octaves < _MOST_OCTAVES else PROTECT_ALL
        keep = _KEEP_PER_UNIT**self._units
        for counts in self._classes:
            counts.uses = [uses * keep for uses in counts.uses]
        self._units = 0

    def _pairs(self) -> list[_Pair]:
        """Returns for each lifetime of pages used once the longest one of the others that the pool has room for."""
        once, again = self._classes
        again_pages, again_hits = _sums(again.pages), _sums(again.uses)
        pairs = []
        for time, (pages, hits) in enumerate(zip(_sums(once.pages), _sums(once.uses), strict=True)):
            room = self._pool_pages - pages
            if room < 0:
                break
            units = bisect_right(again_pages, room) - 1
            part = 0.0
            if units < AGES:
                part = (room - again_pages[units]) / (again_pages[units + 1] - again_pages[units])
                hits += part * again.uses[units]
            if units + part < time * _TRUNK_RATIO:
                break
            pairs.append(_Pair(hits + again_hits[units], time, units + part))
        return pairs


def _sums(counts: deque[float] | list[float]) -> list[float]:
    """Returns the sums of the first 0, 1, ... counts. A count may be a little below 0: ghosts' ages are not exact."""
    return list(accumulate([count if count > 0.0 else 0.0 for count in counts], initial=0.0))
