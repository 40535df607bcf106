"""The free pages of one group on one worker.

Pages that were given back are taken first; the others have never been handed out and need no memory here:

    1 .. fresh - 1       taken or in `_free`
    fresh .. num_pages   never handed out, but for those in `_ahead`, which were claimed by their ids

Only claims and `is_free` need the index of a page in `_free`. It is kept in `_places` from the first such call
on, and dropped when more pages have moved since than a new look would cost: ordinary takes and gives stay slices.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from session.words import PAGE_ID_BYTES


class PagePool:
    """Page ids 1 to num_pages; page 0 is reserved."""

    __slots__ = ("_ahead", "_free", "_fresh", "_moved", "_places", "num_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = self.num_free = num_pages
        self._free = array("I")
        self._fresh = 1
        self._ahead: set[int] = set()
        self._places: array[int] | None = None  # by page id: its index in `_free` + 1; 0 for a taken page
        self._moved = 0  # pages taken and given since `_places` was last used

    def take(self, count: int) -> bytes:
        """Returns `count` packed page ids; the caller has made sure that they are free."""
        free = self._free
        self.num_free -= count
        left = len(free) - count
        if left < 0:
            taken = free.tobytes() + self._take_fresh(-left)
            del free[:]
        else:
            with memoryview(free) as ids:
                taken = ids[left:].tobytes()  # slicing the array would copy twice
            del free[left:]
        if self._places is not None:
            self._track(taken, None)
        return taken

    def _take_fresh(self, count: int) -> bytes:
        start, stop = self._fresh, self._fresh + count
        assert stop <= self.num_pages + 1 - len(self._ahead), "taken more pages than are free"
        self._fresh = stop
        if not self._ahead or self._ahead.isdisjoint(range(start, stop)):
            self._pass_claimed()
            return array("I", range(start, stop)).tobytes()
        ids = array("I")
        self._fresh = start
        while len(ids) < count:
            self._pass_claimed()
            ids.append(self._fresh)
            self._fresh += 1
        self._pass_claimed()
        return ids.tobytes()

    def _pass_claimed(self) -> None:
        while self._fresh in self._ahead:
            self._ahead.remove(self._fresh)
            self._fresh += 1

    def give(self, page_ids: bytes | bytearray) -> None:
        """Takes packed page ids back."""
        self.num_free += len(page_ids) // PAGE_ID_BYTES
        if self._ahead:
            page_ids = self._give_ahead(page_ids)
        self._free.frombytes(page_ids)
        if self._places is not None:
            self._track(page_ids, len(self._free) - len(page_ids) // PAGE_ID_BYTES)

    def _give_ahead(self, page_ids: bytes | bytearray) -> bytes | bytearray:
        """Claimed pages beyond `fresh` count as never handed out again; returns the others."""
        ids = unpack(page_ids)
        if max(ids, default=0) < self._fresh:
            return page_ids
        self._ahead.difference_update(ids)
        return pack(page_id for page_id in ids if page_id < self._fresh)

    def is_free(self, page_id: int) -> bool:
        """O(1), but for the first call after many pages moved."""
        if page_id >= self._fresh:
            return page_id <= self.num_pages and page_id not in self._ahead
        return page_id > 0 and self._where()[page_id] > 0

    def claim(self, page_ids: Iterable[int]) -> None:
        """Takes pages by their ids; they must be free. Takes time for the pages alone, not for the pool."""
        for page_id in sorted(page_ids):
            assert self.is_free(page_id), "claimed a page that is not free"
            self.num_free -= 1
            if page_id >= self._fresh:
                self._ahead.add(page_id)
            else:
                self._remove(page_id)
        self._pass_claimed()

    def _remove(self, page_id: int) -> None:
        """Moves the last free page to the claimed one's place."""
        places, last = self._where(), self._free.pop()
        at = places[page_id]
        places[page_id] = 0
        if last != page_id:
            self._free[at - 1] = last
            places[last] = at

    def _where(self) -> array[int]:
        """Returns `_places`, built anew where it is missing."""
        self._moved = 0
        if self._places is None:
            self._places = array("I", bytes(self._fresh * PAGE_ID_BYTES))
            for at, page_id in enumerate(self._free, 1):
                self._places[page_id] = at
        return self._covering(self._places)

    def _covering(self, places: array[int]) -> array[int]:
        lacking = self._fresh - len(places)
        if lacking > 0:
            places.frombytes(bytes(lacking * PAGE_ID_BYTES))
        return places

    def _track(self, page_ids: bytes | bytearray, start: int | None) -> None:
        """Follows pages that were given from index `start` of `_free` on, or taken (None)."""
        assert self._places is not None
        self._moved += len(page_ids) // PAGE_ID_BYTES
        if self._moved > len(self._free) + self._fresh // 64:
            self._places = None
            return
        places = self._covering(self._places)
        for at, page_id in enumerate(unpack(page_ids), 1):
            places[page_id] = 0 if start is None else start + at

    def free_ids(self) -> bytes:
        """Every free id that was handed out before, in hand-out order; for audits."""
        return self._free.tobytes()

    @property
    def fresh(self) -> int:
        """The first id that was never handed out."""
        return self._fresh

    @property
    def claimed_ahead(self) -> frozenset[int]:
        """Taken ids beyond `fresh`; for audits."""
        return frozenset(self._ahead)

    def check(self) -> None:
        """Raises AssertionError where the kept places or the count are not those of the free pages."""
        num_free = len(self._free) + self.num_pages + 1 - self._fresh - len(self._ahead)
        assert self.num_free == num_free, f"{self.num_free} free pages counted, {num_free} there"
        assert all(self._fresh < page_id <= self.num_pages for page_id in self._ahead), "a claimed page out of place"
        if self._places is not None:
            kept = {page_id: at for page_id, at in enumerate(self._places) if at}
            assert kept == {page_id: at for at, page_id in enumerate(self._free, 1)}, "places of free pages"


def pack(page_ids: Iterable[int]) -> bytes:
    return array("I", page_ids).tobytes()


def unpack(page_ids: bytes | bytearray) -> list[int]:
    ids = array("I")
    ids.frombytes(page_ids)
    return ids.tolist()
