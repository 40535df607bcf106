"""E30: the first 5,000 requests of the public conversation trace, from the file STEMCACHE_TRACE."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from session.messages import Acquire, Extend, Grant, Publish, Release
from session.words import SequenceId, WorkerId
from tests.core import audit
from tests.core.driver import FakeWorker
from tests.core.world import FINISHED, NS, World, full, state

TRACE = os.environ.get("STEMCACHE_TRACE", "")
W0 = WorkerId("w0")


@lru_cache(maxsize=100_000)
def chunk(hash_id: int) -> bytes:
    return array("i", ((k * 7919 + hash_id * 104_729) % 151_000 for k in range(512))).tobytes()


def requests(num_requests: int) -> Iterator[tuple[bytes, bytes]]:
    with Path(TRACE).open() as lines:
        for number, line in zip(range(num_requests), lines, strict=False):
            row = json.loads(line)
            prompt = b"".join(map(chunk, row["hash_ids"]))[: 4 * row["input_length"]]
            output = array("i", ((k * 31 + number * 1_000_003) % 151_000 for k in range(row["output_length"])))
            yield prompt, output.tobytes()


@pytest.mark.slow
@pytest.mark.skipif(not TRACE, reason="STEMCACHE_TRACE names no file")
@pytest.mark.parametrize(("num_pages", "floor"), [(50_000, 0.0453), (200_000, 0.1403), (6_000_000, 0.3394 - 0.00005)])
def test_e30_hit_rates_and_no_leak(num_pages: int, floor: float) -> None:
    world = World()
    FakeWorker(world, [full(num_pages)], 16)
    manager, hit, total = world.manager, 0, 0
    for number, (prompt, output) in enumerate(requests(5_000), 1):
        sequence, length = SequenceId(number), (len(prompt) + len(output)) // 4
        grant = manager.acquire(W0, Acquire(sequence, NS, prompt))
        assert isinstance(grant, Grant)
        manager.extend(W0, Extend(sequence, length))
        manager.publish(W0, Publish(sequence, b"", len(prompt) // 4))
        manager.publish(W0, Publish(sequence, output, length - 1))
        manager.release(W0, Release(sequence, FINISHED))
        hit, total = hit + grant.cached_tokens, total + len(prompt) // 4
    audit.check(manager)
    (stats,) = manager.stats().workers
    assert hit / total >= floor
    assert stats.cached_tokens == hit and stats.prompt_tokens == total
    assert stats.num_leases == stats.num_tickets == 0
    assert stats.groups[0].num_free + stats.groups[0].num_evictable == num_pages


@pytest.mark.slow
@pytest.mark.skipif(not TRACE, reason="STEMCACHE_TRACE names no file")
@pytest.mark.parametrize("interval", [0, 512])
@pytest.mark.parametrize(("slots", "floor"), [(52, 0.0527), (202, 0.1031), (1002, 0.1714)])
def test_e30_hit_rates_of_a_model_with_states(slots: int, floor: float, interval: int) -> None:
    """All pages are kept, and snapshots in `slots` slots: what hits is what eviction left of the snapshots."""
    world = World()
    FakeWorker(world, [full(6_000_000), state(slots, interval=interval)], 16)
    manager, hit, total = world.manager, 0, 0
    for number, (prompt, _) in enumerate(requests(5_000), 1):
        sequence = SequenceId(number)
        grant = manager.acquire(W0, Acquire(sequence, NS, prompt))
        assert isinstance(grant, Grant)
        manager.publish(W0, Publish(sequence, b"", len(prompt) // 4))
        manager.release(W0, Release(sequence, FINISHED))
        hit, total = hit + grant.cached_tokens, total + len(prompt) // 4
    audit.check(manager)
    assert hit / total >= floor
