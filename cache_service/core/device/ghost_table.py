"""What was evicted lately: marks for short runs of pages that were cut off a tree, in a table of fixed size.

A mark stands for a run by its first page: a hash of the namespace, the page number, the page's tokens and those
of the page before it. A cut leaves a mark for its first page and one at each multiple of `STRIDE_PAGES`, so two prompts
that part inside a long evicted run are told apart there.

Marks are hints: a wrong or lost one makes a miss reason or a policy's choice wrong, never an answer. Wrong ones come
from prompts that agree on two pages at the same page number but not before them, and from equal marks: 4 of
2^29 unknown pages in a full table. Lost ones come from a set of the table that more than four live marks fall into.

The table is an array of 64-bit entries in sets of four. A mark names an entry, its home, and a tag:

    unit of time, 22 bits | pages, 10 bits | kind, 2 bits | opens a node, 1 bit | tag, 29 bits

Time is on top, so older entries are smaller numbers; empty ones are 0. Entries before `_horizon` count as absent, so
forgetting the oldest sweeps nothing. A new mark goes home, or to another entry of that set that counts no more, or
overwrites the set's oldest.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import IntEnum
from typing import NamedTuple

# A mark at each multiple of this page number. Finer ones cost more than they bring: with 32, 64, 128 a request of the
# public trace takes 38, 20, 8 % longer at 200,000 pages, and adaptive hits 19.0 % with 32, 18.9 % with 128 and 512.
STRIDE_PAGES = 512
# Ages are told in parts of the pool's size.
AGE_PARTS = 16

_WAYS = 4
_ENTRY_BYTES = 8
# About one entry a page of the limit: 4 to 8 bytes. In the smallest pools no mark is lost; 32 MiB are the most.
_LEAST_ENTRIES, _MOST_ENTRIES = 1 << 10, 1 << 22

_TAG_MASK = (1 << 29) - 1
_OPENS_NODE = 1 << 29
_KIND_SHIFT = 30
_PAGES_SHIFT, _PAGES_MASK = 32, (1 << 10) - 1
_UNIT_SHIFT = 42
_MOST_UNITS = (1 << 22) - 1
# Marks of 64 pools ago are forgotten, however few they are.
_MOST_AGE = 64 * AGE_PARTS
# Of a mark: above the tag's bits.
_HOME_SHIFT = 32
_MARK_MASK = (1 << 60) - 1


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


def mark_of(digest: bytes, page: int, tokens: bytes) -> int:
    """Returns the mark of a page; `tokens` are those of the page before it and its own.

    Python's hash is keyed by the process, so no client can choose tokens whose marks meet, and it takes 0.2 us.
    """
    return hash((digest, page, tokens)) & _MARK_MASK


class GhostTable:
    """The marks of one worker; `limit` is in pages, 0 keeps none."""

    def __init__(self, limit: int, pool_pages: int) -> None:
        self._max_pages = limit
        self._most_pages = min(limit, _PAGES_MASK)  # of one mark
        self._unit_pages = max(pool_pages // AGE_PARTS, 1)
        num_entries = 1 << max(limit.bit_length() - 1, 0)
        num_entries = min(max(num_entries, _LEAST_ENTRIES), _MOST_ENTRIES) if limit else _WAYS
        self._home_mask = num_entries - 1
        self._num_bytes = num_entries * _ENTRY_BYTES
        self._forget_all()

    def _forget_all(self) -> None:
        """Empties the table. Its memory is zero pages of the system until it is written."""
        self._buffer = bytearray(self._num_bytes)
        self._entries = memoryview(self._buffer).cast("Q")
        self._cut_pages = 0
        self._unit = 1
        self._older: deque[int] = deque()  # pages that are remembered of earlier units, newest first
        self.num_pages = 0
        """Pages that are remembered."""
        self._set_times(0)

    def add(self, mark: int, kind: GhostKind, num_pages: int, opens_node: bool = False) -> None:
        """Remembers a run that was cut just now, in place of an earlier entry of its first page."""
        if num_pages > self._most_pages:
            self._cut_pages += num_pages - self._most_pages
            num_pages = self._most_pages
            if not num_pages:
                return
        self._cut_pages = cut_pages = self._cut_pages + num_pages
        if cut_pages >= self._next_at:
            self._pass_time(num_pages)
        entries, index, tag = self._entries, mark >> _HOME_SHIFT & self._home_mask, mark & _TAG_MASK
        if entries[index] >= self._horizon:
            index = self._free_entry(index, tag)
        if opens_node:
            tag |= _OPENS_NODE
        entries[index] = self._now | num_pages << _PAGES_SHIFT | kind << _KIND_SHIFT | tag
        self.num_pages += num_pages

    def _free_entry(self, home: int, tag: int) -> int:
        """Returns an entry of the set to overwrite: the mark's own, an absent one, or the oldest.

        `find` looks at the entries in the same order: so of two entries of one mark, it meets the newer one first.
        """
        entries, horizon = self._entries, self._horizon
        oldest = entries[home]
        at = home
        if oldest & _TAG_MASK != tag:
            for index in (home ^ 1, home ^ 2, home ^ 3):
                held = entries[index]
                if held < horizon:
                    return index
                if held & _TAG_MASK == tag:
                    oldest, at = held, index
                    break
                if held < oldest:
                    oldest, at = held, index
        self._uncount(oldest)
        return at

    def _uncount(self, held: int) -> None:
        num_pages = held >> _PAGES_SHIFT & _PAGES_MASK
        self.num_pages -= num_pages
        if held < self._now:
            self._older[self._unit - (held >> _UNIT_SHIFT) - 1] -= num_pages

    # Time.

    def _pass_time(self, num_pages: int) -> None:
        """Begins a new unit when its time has come, and makes room for `num_pages` pages."""
        unit = self._cut_pages // self._unit_pages + 1
        if unit > _MOST_UNITS:
            self._forget_all()  # once in 262,144 pools, so that time has no wrap-around
            return
        if unit > self._unit:
            self._begin_unit(unit)
        older = self._older
        while older and self.num_pages + num_pages > self._max_pages:
            self.num_pages -= older.pop()
        if self.num_pages + num_pages > self._max_pages:  # also what was cut in this unit is too much
            self._cut_pages = self._unit * self._unit_pages
            self._begin_unit(self._unit + 1)
            self.num_pages -= sum(older)
            older.clear()
        self._set_times(num_pages)

    def _begin_unit(self, unit: int) -> None:
        older = self._older
        older.appendleft(self.num_pages - sum(older))
        older.extendleft([0] * min(unit - self._unit - 1, _MOST_AGE))
        while len(older) > _MOST_AGE:
            self.num_pages -= older.pop()
        self._unit = unit

    def _set_times(self, num_pages: int) -> None:
        """`_now` and `_horizon` are the least entries of this unit and of the oldest one that counts."""
        self._now = self._unit << _UNIT_SHIFT
        self._horizon = self._unit - len(self._older) << _UNIT_SHIFT
        # Before that number of pages the unit does not end, and the limit cannot be passed.
        room = self._max_pages - self.num_pages - num_pages
        self._next_at = min(self._unit * self._unit_pages, self._cut_pages + room + 1)

    @property
    def unit(self) -> int:
        """The unit of time in which pages are cut now."""
        return self._unit

    @property
    def cut_pages(self) -> int:
        """Grows with every cut, by the pages that were cut or more."""
        return self._cut_pages

    # Reading and taking.

    def find(self, mark: int) -> Ghost | None:
        """Returns the newest entry of the page; None where it was taken or is too old."""
        home, tag, horizon = mark >> _HOME_SHIFT & self._home_mask, mark & _TAG_MASK, self._horizon
        for index in (home, home ^ 1, home ^ 2, home ^ 3):
            held = self._entries[index]
            if held >= horizon and held & _TAG_MASK == tag:
                return self._ghost(held)
        return None

    def _ghost(self, held: int) -> Ghost:
        kind, age = _KINDS[held >> _KIND_SHIFT & 3], self._unit - (held >> _UNIT_SHIFT)
        return Ghost(kind, held >> _PAGES_SHIFT & _PAGES_MASK, age, held & _OPENS_NODE > 0)

    def take(self, mark: int) -> None:
        """Forgets a mark: its run is cached again."""
        entries, horizon = self._entries, self._horizon
        home, tag = mark >> _HOME_SHIFT & self._home_mask, mark & _TAG_MASK
        for index in (home, home ^ 1, home ^ 2, home ^ 3):
            held = entries[index]
            if held >= horizon and held & _TAG_MASK == tag:
                entries[index] = 0
                self._uncount(held)

    # Audits.

    def check(self) -> None:
        """Raises AssertionError where the counts are not those of the entries."""
        assert 0 <= self.num_pages <= self._max_pages, "more ghosts than the limit"
        pages: Counter[int] = Counter()
        for held in self._live():
            pages[self._unit - (held >> _UNIT_SHIFT)] += held >> _PAGES_SHIFT & _PAGES_MASK
        counted = [self.num_pages - sum(self._older), *self._older]
        assert [pages[age] for age in range(len(counted))] == counted, "ghosts of a unit are miscounted"
        assert sum(pages.values()) == self.num_pages, "ghost pages are miscounted"

    def _live(self) -> list[int]:
        """Every entry that counts. Parts of the table that are empty are passed over quickly."""
        part = 32
        blank = bytes(part * _ENTRY_BYTES)
        live = []
        for first in range(0, len(self._entries), part):
            entries = self._entries[first : first + part]
            if entries.tobytes() != blank:
                live += [held for held in entries if held >= self._horizon]
        return live

    def snapshot(self) -> tuple[object, ...]:
        return (self._unit, self._cut_pages, self.num_pages, tuple(self._older), bytes(self._buffer))
