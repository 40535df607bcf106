"""Two processes of one worker id after a restart of the service: the one that started later stays."""

from __future__ import annotations

import pytest

from cache_service.core.base.errors import Superseded
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from tests.core.inventory_stage import WORKER, Stage


def test_of_two_incarnations_the_one_that_started_earlier_is_refused() -> None:
    """After a restart of the service, which has forgotten who replaced whom."""
    stage = Stage()
    older = stage.hello._replace(incarnation="older", started_ns=1_000_000_000)
    newer = stage.hello._replace(incarnation="newer", started_ns=3_500_000_000)
    manager = CacheManager(ManagerConfig(), "epoch-2")
    manager.hello(newer, 0)
    with pytest.raises(
        Superseded, match=r"hello\.incarnation: an incarnation of w that started 2\.500 s later is here"
    ):
        manager.hello(older, 1)
    assert manager.workers[WORKER].hello.incarnation == "newer"
    manager.disconnect(WORKER, "newer", 2)  # away for a moment
    with pytest.raises(Superseded):
        manager.hello(older, 3)
    assert manager.hello(newer._replace(generation=1), 4).generation == 1


def test_the_later_one_takes_over_whoever_comes_first() -> None:
    stage = Stage()
    older = stage.hello._replace(incarnation="older", started_ns=1)
    manager = CacheManager(ManagerConfig(), "epoch-2")
    manager.hello(older, 0)
    manager.hello(older._replace(incarnation="newer", started_ns=2), 1)
    with pytest.raises(Superseded):
        manager.hello(older, 2)


@pytest.mark.parametrize(("present", "comes"), [(0, 1), (1, 0), (5, 5)])
def test_without_an_order_arrival_decides(present: int, comes: int) -> None:
    stage = Stage()
    manager = CacheManager(ManagerConfig(), "epoch-2")
    manager.hello(stage.hello._replace(incarnation="present", started_ns=present), 0)
    manager.hello(stage.hello._replace(incarnation="comes", started_ns=comes), 1)
    assert manager.workers[WORKER].hello.incarnation == "comes"
