"""The quota of a host tier: how many bytes its rows may take, and what counts where room is needed.

rows that no lease holds  go, the least recently used first, once all rows together take more (`HashIndex.shrink`)
rows that leases hold     count, and stay
pages being written       count, from an attached engine's Reserve to its Commit
"""

from __future__ import annotations


class Quota:
    """The books of one tier. Its rows are the hash index's."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of all rows
        self.num_held = self.held_bytes = 0  # rows that leases of attached engines hold
        self.reserved_bytes = 0  # of pages that attached engines are writing

    @property
    def is_exceeded(self) -> bool:
        return self.num_bytes > self.max_bytes

    @property
    def room_bytes(self) -> int:
        """Returns how much an attached engine may write: rows that no lease holds make room."""
        return self.max_bytes - self.held_bytes - self.reserved_bytes

    def grow(self, num_bytes: int, *, is_held: bool) -> None:
        """Counts `num_bytes` more of a row."""
        self.num_bytes += num_bytes
        if is_held:
            self.held_bytes += num_bytes

    def drop(self, num_bytes: int, *, is_held: bool) -> None:
        """Counts a row of `num_bytes` that is gone."""
        self.num_bytes -= num_bytes
        if is_held:
            self.let_go(num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Counts a row that no lease held before."""
        self.num_held += 1
        self.held_bytes += num_bytes

    def let_go(self, num_bytes: int) -> None:
        """Counts a row of `num_bytes` that no lease holds any more."""
        self.num_held -= 1
        self.held_bytes -= num_bytes

    def clear(self) -> None:
        """All rows have gone; what is being written still counts."""
        self.num_bytes = self.num_held = self.held_bytes = 0
