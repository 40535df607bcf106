"""The free pages of one group on one worker. Knows no token, hash, lease or time.

Pages that were given back are taken first; the others have never been handed out and need no memory here:

    1 .. fresh - 1   taken or in `_free`
    fresh .. num_pages   never handed out
"""

from __future__ import annotations

from array import array


class PagePool:
    """Page ids 1 to num_pages; page 0 is reserved."""

    __slots__ = ("_free", "_fresh", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = array("I")
        self._fresh = 1

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_pages + 1 - self._fresh

    def take(self, count: int) -> bytes:
        """`count` packed page ids; the caller has made sure that they are free."""
        free = self._free
        held = len(free)
        if count <= held:
            taken = free[held - count :].tobytes()
            del free[held - count :]
            return taken
        start = self._fresh
        stop = start + count - held
        assert stop <= self.num_pages + 1, "taken more pages than are free"
        self._fresh = stop
        taken = free.tobytes() + array("I", range(start, stop)).tobytes()
        del free[:]
        return taken

    def give(self, page_ids: bytes | bytearray) -> None:
        """Take packed page ids back."""
        self._free.frombytes(page_ids)

    def is_free(self, page_id: int) -> bool:
        return self._fresh <= page_id <= self.num_pages or page_id in self._free

    def claim(self, page_ids: frozenset[int]) -> None:
        """Take these very pages, which are free. Rare: a scan of the free list."""
        top = max(page_ids, default=0)
        if top >= self._fresh:
            self._free.extend(range(self._fresh, top + 1))
            self._fresh = top + 1
        kept = array("I", (page_id for page_id in self._free if page_id not in page_ids))
        assert len(kept) + len(page_ids) == len(self._free), "claimed a page that is not free"
        self._free = kept

    def free_ids(self) -> bytes:
        """Every free id that was handed out before, in hand-out order; for audits."""
        return self._free.tobytes()

    @property
    def fresh(self) -> int:
        """The first id that was never handed out."""
        return self._fresh


def pack(page_ids: list[int]) -> bytes:
    return array("I", page_ids).tobytes()


def unpack(page_ids: bytes | bytearray) -> list[int]:
    ids = array("I")
    ids.frombytes(page_ids)
    return ids.tolist()
