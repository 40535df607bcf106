"""What was evicted lately: one short mark for a run of up to 512 pages that was cut off a tree, in bounded memory.

A mark stands for a run by its first page: a fingerprint of the namespace, the page number, the page's tokens and those
of the page before it. A cut leaves a mark for its first page and one at each multiple of 512, so two prompts that part
inside a long evicted run are told apart there. Marks at each 32 pages took half of a request's time on the public
trace, and brought no more hits (lru 15.3 %, with 512 15.5 %).

Marks are hints: a wrong one makes a miss reason or a policy's choice wrong, never an answer. Wrong ones come from
prompts that agree on two pages at the same page number but not before them, and from equal fingerprints (at a million
marks, once in 10^12 unknown pages).

A mark is one number in a dict, by its fingerprint. It takes about 110 bytes; 16 in a packed table, where adding one
took 10 us instead of 1.5:

    unit of time | pages, 15 bits | opens a node, 1 bit | kind, 2 bits
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple

# A mark at each multiple of this page number.
STRIDE_PAGES = 512
# Of a mark: two integers and its place in a dict, at the dict's emptiest.
MARK_BYTES = 128
# What marks may take for each page of the limit: long runs stay far below it, runs of fewer than 8 pages are
# forgotten earlier.
BYTES_PER_PAGE = 16
# Also a pool without a limit has bounded ghosts: 128 MiB at most.
_MOST_MARKS = 1 << 20
_FINGERPRINT_MASK = (1 << 60) - 1
_OPENS_NODE, _KIND_MASK = 4, 3
_PAGES_SHIFT, _PAGES_BITS = 3, 15
_UNIT_SHIFT = _PAGES_SHIFT + _PAGES_BITS
_MOST_PAGES = (1 << _PAGES_BITS) - 1

# The limit is that of so many generations; the oldest one is forgotten as a whole.
GENERATIONS = 8
# Ages are told in parts of the pool's size.
AGE_PARTS = 16


class GhostKind(IntEnum):
    """What became of the run."""

    ONCE = 1  # evicted, used once
    AGAIN = 2  # evicted, used again before
    CLEARED = 3  # dropped by a Clear call


class Ghost(NamedTuple):
    """`age` counts the pages that were cut since, in sixteenths of the pool.

    `opens_node`: the run began a node of the tree; otherwise it lay behind others of the same node.
    """

    kind: GhostKind
    num_pages: int
    age: int
    opens_node: bool = False


_KINDS = (GhostKind.ONCE, GhostKind.ONCE, GhostKind.AGAIN, GhostKind.CLEARED)


def fingerprint(digest: bytes, page: int, tokens: bytes) -> int:
    """Of the page whose tokens, after those of the page before it, are given.

    Python's hash is keyed by the process, so nobody outside can choose tokens whose marks meet, and it takes 0.2 us.
    """
    return hash((digest, page, tokens)) & _FINGERPRINT_MASK


class _Generation:
    """Marks that were left in one stretch of time."""

    __slots__ = ("marks", "num_pages")

    def __init__(self) -> None:
        self.marks: dict[int, int] = {}
        self.num_pages = 0


class GhostTable:
    """The marks of one worker; `limit` is in pages, 0 keeps none."""

    def __init__(self, limit: int, pool_pages: int) -> None:
        self._max_pages = limit
        self._max_marks = min(-(-limit * BYTES_PER_PAGE // MARK_BYTES), _MOST_MARKS)
        self._unit_pages = max(pool_pages // AGE_PARTS, 1)
        self._cut_pages = 0
        self._newest = _Generation()
        self._generations = deque([self._newest])  # newest first
        self.num_pages = 0
        """Pages that are remembered."""
        self.num_marks = 0

    def add(self, mark: int, kind: GhostKind, num_pages: int, *, opens_node: bool = False) -> None:
        """Remember a run that was cut just now; what was known about its first page counts no more."""
        if not self._max_pages:
            return
        self._cut_pages += num_pages
        num_pages = min(num_pages, _MOST_PAGES, self._max_pages)
        newest = self._newest
        before = newest.marks.get(mark)
        if before is not None:
            self._uncount(newest, before)
        flags = kind | _OPENS_NODE if opens_node else kind
        newest.marks[mark] = self._cut_pages // self._unit_pages << _UNIT_SHIFT | num_pages << _PAGES_SHIFT | flags
        newest.num_pages += num_pages
        self.num_pages += num_pages
        self.num_marks += 1
        if newest.num_pages * GENERATIONS > self._max_pages or len(newest.marks) * GENERATIONS > self._max_marks:
            self._newest = _Generation()
            self._generations.appendleft(self._newest)
        elif self.num_pages <= self._max_pages and self.num_marks <= self._max_marks:
            return
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Generations beyond the limit, and those that nothing is left of."""
        while self.num_pages > self._max_pages or self.num_marks > self._max_marks or not self._generations[-1].marks:
            if len(self._generations) == 1:
                break
            oldest = self._generations.pop()
            self.num_pages -= oldest.num_pages
            self.num_marks -= len(oldest.marks)

    def find(self, mark: int) -> Ghost | None:
        """The newest word about the page, unless it was taken."""
        for generation in self._generations:
            held = generation.marks.get(mark)
            if held is not None:
                return self._ghost(held)
        return None

    def take(self, mark: int) -> Ghost | None:
        """The run comes back: forget its mark."""
        newest = None
        for generation in self._generations:
            held = generation.marks.pop(mark, None)
            if held is not None:
                self._uncount(generation, held)
                newest = held if newest is None else newest
        return None if newest is None else self._ghost(newest)

    def _uncount(self, generation: _Generation, held: int) -> None:
        num_pages = held >> _PAGES_SHIFT & _MOST_PAGES
        generation.num_pages -= num_pages
        self.num_pages -= num_pages
        self.num_marks -= 1

    def _ghost(self, held: int) -> Ghost:
        age = self._cut_pages // self._unit_pages - (held >> _UNIT_SHIFT)
        return Ghost(_KINDS[held & _KIND_MASK], held >> _PAGES_SHIFT & _MOST_PAGES, age, bool(held & _OPENS_NODE))

    def check(self) -> None:
        """Raises AssertionError where the counts are not those of the marks; for audits."""
        assert self.num_pages <= self._max_pages and self.num_marks <= self._max_marks, "more ghosts than the limit"
        assert self.num_marks == sum(len(generation.marks) for generation in self._generations), "marks are miscounted"
        assert self.num_pages == sum(generation.num_pages for generation in self._generations), "pages are miscounted"
        for generation in self._generations:
            pages = sum(held >> _PAGES_SHIFT & _MOST_PAGES for held in generation.marks.values())
            assert generation.num_pages == pages, "ghost pages of a generation are miscounted"

    def snapshot(self) -> tuple[dict[int, int], ...]:
        return tuple(dict(generation.marks) for generation in self._generations)
