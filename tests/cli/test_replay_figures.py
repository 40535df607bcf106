"""The replay of a small trace in Mooncake's format: hits by hand, nothing held at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.replay import replay
from tests.core import audit


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"input_length": 1024, "output_length": 20, "hash_ids": [1, 2]},
        {"input_length": 1000, "output_length": 1, "hash_ids": [1, 2]},
        {"input_length": 600, "output_length": 5, "hash_ids": [1, 3]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("policy", ["lru", "slru", "priority"])
def test_hits_are_cached_over_prompt_tokens(trace: Path, policy: str) -> None:
    manager = replay.make_manager(0, 16, policy)
    figures = replay.replay(manager, replay.read_trace(trace))
    assert figures.requests == 3 and figures.evicted_pages == 0
    assert figures.hit_rate == pytest.approx((0 + 992 + 512) / (1024 + 1000 + 600))
    audit.check(manager)
    (worker,) = manager.stats().workers
    assert worker.num_leases == 0 and worker.cached_tokens == 992 + 512


def test_a_small_pool_evicts_just_what_is_needed(trace: Path) -> None:
    manager = replay.make_manager(70, 16, "lru")
    figures = replay.replay(manager, replay.read_trace(trace))
    audit.check(manager)
    pages = sum(node.resident for node in audit.nodes_of(manager.worker(replay.WORKER)))
    assert figures.evicted_pages > 0 and pages <= 70


def test_so_many_requests_and_no_more(trace: Path) -> None:
    requests = list(replay.read_trace(trace, 2))
    assert [len(request.prompt) // 4 for request in requests] == [1024, 1000]
    assert requests[0].prompt[: 512 * 4] == requests[1].prompt[: 512 * 4]
    assert requests[0].output[:4] != requests[1].output[:4]
