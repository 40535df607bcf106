"""What the engine's metrics count, and when."""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry

from tests.worker_service.engine_harness import collect, running_engine
from tests.worker_service.test_engine import prompt_of
from worker_service.metrics import OUTCOMES, WorkerMetrics


class Seen:
    """The metrics of one harness."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.observer = WorkerMetrics(self.registry)

    def get(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"stemcache_worker_{name}", labels)
        assert value is not None, f"{name} {labels} is not there"
        return value


def test_every_outcome_is_there_from_the_start() -> None:
    seen = Seen()
    assert [seen.get("requests_total", outcome=outcome) for outcome in OUTCOMES] == [0, 0, 0]
    assert seen.get("tokens_total", origin="generated") == 0


async def test_a_finished_request() -> None:
    seen = Seen()
    async with running_engine(observer=seen.observer) as harness:
        for _ in range(2):
            await collect(harness.ask(prompt_of(1, 22), 6))
    assert seen.get("requests_total", outcome="finished") == 2
    assert [seen.get("tokens_total", origin=origin) for origin in ("computed", "cached")] == [24, 20]
    assert seen.get("matched_tokens_total") == 20
    assert seen.get("tokens_total", origin="generated") == 12
    assert seen.get("inter_token_seconds_count") == 10
    assert seen.get("end_to_end_seconds_count") == 2
    assert seen.get("end_to_end_seconds_sum") >= seen.get("first_token_seconds_sum")
    assert seen.get("aborted_tokens_total") == 0


async def test_tokens_count_while_the_request_runs_and_stay_when_it_is_aborted() -> None:
    seen = Seen()
    async with running_engine(observer=seen.observer) as harness:
        stream = harness.ask(prompt_of(2, 9), 150)
        num_read = 0
        while num_read < 5:
            num_read += len((await stream.next_piece()).token_ids)
        assert seen.get("tokens_total", origin="generated") >= 5
        harness.engine.abort(stream)
        await harness.settled()
    assert seen.get("requests_total", outcome="aborted") == 1
    assert seen.get("tokens_total", origin="computed") == 9
    assert seen.get("aborted_tokens_total") == seen.get("tokens_total", origin="generated") >= 5


async def test_a_failed_request_and_one_that_never_ran() -> None:
    seen = Seen()
    async with running_engine(observer=seen.observer, token_budget=16) as harness:
        harness.runner.fail_when = lambda batch: True
        for length in (30, 7):
            try:
                await collect(harness.ask(prompt_of(3, length), 4))
            except Exception as error:
                assert "forward pass" in str(error)
        harness.runner.gate = threading.Event()
        waiting = harness.ask(prompt_of(4, 9), 4)
        harness.engine.abort(waiting)
        harness.runner.gate.set()
        await harness.settled()
    assert seen.get("requests_total", outcome="failed") == 2
    assert seen.get("requests_total", outcome="aborted") == 1
    assert seen.get("tokens_total", origin="generated") == 0
    assert seen.get("failed_launches_total") == 2
