"""The oracle that judges the manager's state machine: what it must let pass, and what it must not."""

from __future__ import annotations

import pytest

from tests.core.driver import FakeWorker
from tests.core.oracle import Oracle
from tests.core.world import World, full


class Judged:
    """A worker with pages for eight times two tokens, and its oracle."""

    def __init__(self, policy: str) -> None:
        self.worker = FakeWorker(World(policy=policy, watch=True), [full(8)], 2)
        self.oracle = Oracle(self.worker)

    def run(self, tokens: list[int], priority: int = 0) -> None:
        live = self.worker.start(tokens, priority=priority)
        self.worker.prefill(live)
        self.worker.release(live)
        self.oracle.used(live)

    def take(self, num_pages: int) -> None:
        """Pages for a prompt that hits nothing; the evictions are judged."""
        leaves = self.oracle.leaves()
        self.worker.start([90] * (2 * num_pages))
        self.oracle.judge_evictions(leaves)


def test_a_leaf_that_an_eviction_made_is_as_young_as_that() -> None:
    """1 stands in front of 2; when 2 is gone it goes after 3, though 3 was used later."""
    judged = Judged("lru")
    judged.run([1, 1, 2, 2])
    judged.run([1, 1])
    judged.run([3, 3, 4, 4, 5, 5, 6, 6])
    judged.take(3)
    judged.take(1)
    assert [path[1] for path in judged.oracle.removed[0]] == [(3, 3, 4, 4, 5, 5, 6, 6)]


def test_an_order_that_is_not_that_of_the_last_uses_is_told() -> None:
    judged = Judged("priority")
    judged.run([1, 1, 2, 2], priority=1)
    judged.run([3, 3, 4, 4])
    with pytest.raises(AssertionError, match="a younger leaf went before an older one"):
        judged.take(5)
