"""How a launch of few rows is divided."""

from collections.abc import Sequence

__all__ = ["PARTS", "REGISTERS_OF_BOTH", "heads_of_both"]

PARTS = 8  # of 64 value columns
# Of a thread of `weigh_and_attend`: another program has room beside one.
REGISTERS_OF_BOTH = 120


def heads_of_both(groups: Sequence[int], heads: int, pieces: int, room: int) -> int | None:
    """Returns how many heads the programs have that make weights and values; None where these are made apart.

    Of `groups`, in ascending order, the first whose programs are at most `room`, so that none begins when others have
    ended. `pieces`: of all rows of the launch.
    """
    return next((group for group in groups if pieces * -(-heads // group) * PARTS <= room), None)
