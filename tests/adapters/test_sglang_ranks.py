"""Two tensor-parallel ranks of SGLang without SGLang: each has pages of its own, and both load the same or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import TypeVar

import pytest
import torch.distributed as dist

from adapters.sglang.offloads import Part
from adapters.sglang.ranks import least_of
from tests.adapters.test_sglang_hybrid import Rank, ids, ranked, slots, state
from tests.tier_client.conftest import common_stage, shared
from tests.tier_client.stage import Stage
from tier_client.values import PagePath

__all__ = ["common_stage", "shared"]

T = TypeVar("T")


class Ranks:
    """Two ranks over torch.distributed, in threads; their groups end at the boundaries 2, 4 and 6."""

    def __init__(self, ranks: list[Rank], threads: ThreadPoolExecutor) -> None:
        self.ranks, self._threads = ranks, threads

    def both(self, call: Callable[[Rank], T]) -> list[T]:
        return list(self._threads.map(call, self.ranks, timeout=60))

    def save(self, names: list[bytes]) -> None:
        for rank in self.ranks:
            for end in (2, 4, 6):
                where = slots(*range(1 + end - 2, 1 + end))
                assert rank.save(names[end - 2 : end], Part(0, 2, where), Part(1, 2, where), Part(2, 1, state(end)))


@pytest.fixture
def ranks(shared: Stage) -> Iterator[Ranks]:
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        store = dist.HashStore()
        groups = threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)), range(2))
        settings = [{"rank": rank, "least": least_of(group)} for rank, group in enumerate(groups)]
        yield Ranks([stack.enter_context(ranked(shared, **one)) for one in settings], threads)


def lose(stage: Stage, rank: Rank, names: list[bytes], group: int) -> None:
    """The store evicts what this rank reads last of a group."""
    hit = rank.client.calls.lookup(PagePath(b"".join(names)), 0)
    assert hit is not None and hit.usable_pages == len(names)
    with stage.redis.client() as redis:
        assert redis.delete(hit.pages[group].keys(0)[-1])


def test_a_boundary_that_one_rank_has_lost_is_no_ranks(ranks: Ranks, shared: Stage) -> None:
    names = ids(6, "lost")
    ranks.save(names)
    lose(shared, ranks.ranks[1], names, group=2)
    assert ranks.both(lambda rank: rank.reads.lengths("a", names)) == [[4], [4]]
    assert ranks.both(lambda rank: rank.reads.lengths("a", names)) == [[4], [4]], "it is not read again"
    ranks.both(lambda rank: rank.load("a", names[:4], slots(1, 2, 3, 4), slots(3, 4), state(5)))


def test_ranks_that_lost_different_boundaries_meet_before_both(ranks: Ranks, shared: Stage) -> None:
    names = ids(6, "apart")
    ranks.save(names)
    lose(shared, ranks.ranks[0], names, group=2)
    lose(shared, ranks.ranks[1], names[:4], group=2)
    assert ranks.both(lambda rank: rank.reads.lengths("a", names[:4])) == [[2], [2]]
    assert ranks.both(lambda rank: rank.reads.lengths("b", names)) == [[2], [2]], "they have 4 and 6"


def test_what_one_rank_has_not_is_nobodys(ranks: Ranks) -> None:
    names = ids(2, "one")
    assert ranks.ranks[0].save(names, Part(0, 2, slots(1, 2)), Part(1, 2, slots(1, 2)), Part(2, 1, state(1)))
    assert ranks.both(lambda rank: rank.reads.lengths("a", names)) == [[], []]


def test_a_load_that_one_rank_cannot_make_is_made_by_none(ranks: Ranks) -> None:
    """SGLang computes what is not loaded, on each rank for itself: a rank that computes less waits for the others."""
    names = ids(6, "dropped")
    ranks.save(names)
    assert ranks.both(lambda rank: rank.reads.lengths("a", names)) == [[6], [6]]
    ranks.ranks[1].reads.drop("a")  # as after half a minute in which one process stood still
    assert ranks.both(lambda rank: rank.reads.take("a", names)) == [None, None]
