"""What happens per second, out of looks at counters."""

from __future__ import annotations

import pytest

from cli.rates import Rates, RecentLooks
from protos.v1 import cache_pb2


def look(
    requests: int, prompt: int, cached: int, fetched: int = 0, *, life: str = "a", epoch: str = "e"
) -> cache_pb2.StatsResponse:
    made = cache_pb2.StatsResponse(epoch=epoch)
    worker = made.workers.add(worker_id="w", incarnation=life, num_requests=requests, prompt_tokens=prompt)
    worker.cached_tokens, worker.fetched_tokens, worker.computed_tokens = cached, fetched, prompt - cached - fetched
    return made


def rates(*looks: tuple[float, cache_pb2.StatsResponse]) -> Rates | None:
    recent = RecentLooks()
    for now_s, stats in looks:
        recent.add(stats, now_s)
    return recent.rates().get("w")


def test_there_are_none_before_the_second_look() -> None:
    assert rates((0.0, look(5, 500, 100))) is None


def test_differences_by_time() -> None:
    assert rates((1.0, look(5, 500, 100)), (3.0, look(9, 1500, 700, 150))) == Rates(2.0, 500.0, 125.0, 0.75)
    assert rates((1.0, look(5, 500, 100)), (3.0, look(5, 500, 100))) == Rates(0.0, 0.0, 0.0, None)


def test_only_the_last_seconds_count() -> None:
    busy = [(float(at), look(100 * at, 100 * at, 0)) for at in range(20)]
    idle = [(float(at), look(1900, 1900, 0)) for at in range(20, 40)]
    assert rates(*busy, *idle[:5]) == Rates(50.0, 50.0, 50.0, 0.0)
    assert rates(*busy, *idle) == Rates(0.0, 0.0, 0.0, None)


@pytest.mark.parametrize("more", [{"life": "b"}])
def test_a_worker_that_began_anew_counts_from_zero(more: dict[str, str]) -> None:
    assert rates((0.0, look(50, 500, 100)), (1.0, look(2, 20, 10, **more))) == Rates(2.0, 20.0, 10.0, 0.5)


def test_another_epoch_begins_anew() -> None:
    assert rates((0.0, look(50, 500, 100)), (1.0, look(60, 600, 100, epoch="f"))) is None
