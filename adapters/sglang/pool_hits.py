"""How far a prefix is restorable whose pools each have pages in the host tier by a rule of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

# Two pools may take turns in finding an earlier boundary.
MAX_ROUNDS = 8


class Pool(Protocol):
    def num_present(self, ids: Sequence[bytes]) -> int: ...


class PoolHits(NamedTuple):
    """In pages; `by_pool`: the boundary that each pool has found itself, those that found none left out."""

    usable: int
    by_pool: dict[str, int]


def pool_hits(tokens: str, pools: Mapping[str, Pool], ids: Sequence[bytes]) -> PoolHits:
    """`tokens` names the pool of all tokens. Returns the last boundary at which each of the pools can be restored."""
    usable = pools[tokens].num_present(ids)
    by_pool = {tokens: usable}
    others = {name: pool for name, pool in pools.items() if name != tokens}
    for _ in range(MAX_ROUNDS):
        before = usable
        for name, pool in others.items():
            usable = by_pool[name] = pool.num_present(ids[:usable]) if usable else 0
        # A single pool decides alone.
        if usable == before or len(others) < 2:
            break
    else:
        usable = 0
    return PoolHits(usable, {name: pages for name, pages in by_pool.items() if pages})
