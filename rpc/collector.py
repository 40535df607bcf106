"""Python's cycle collector, set for a process that serves: what exists at its start stays, and pauses are short."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Thresholds(NamedTuple):
    """New objects before a young collection, young ones before a middle one, middle ones before a full one."""

    young: int
    middle: int
    full: int


# For a heap of trees that live long. A full collection walks every radix node, so it is made rare; it still comes,
# since a namespace's root that was dropped is a cycle. The others hold the loop too: while workers are adopted, a young
# one of 50,000 objects takes 50 to 100 ms, one of 2,000 takes 2 and the middle one after it 8. Walked in small parts,
# the objects cost 36 ms for 1,000,000 pages, in large parts 18.
LONG_LIVED = Thresholds(2_000, 1, 12_000)
# For objects that live for one launch: 256 rows make 2,000 of them, and at Python's own threshold of 700 these are
# walked twice before they are dropped.
SHORT_LIVED = Thresholds(50_000, 5, 100)


@contextmanager
def seldom_collected(thresholds: Thresholds) -> Iterator[None]:
    """Leaves what exists by now (modules, the server) out of every collection inside; full collections are rare."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
