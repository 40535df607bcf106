"""Order and extent of eviction. The ids in test names are those of docs/cases.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cache_service.core.device.eviction_order import POLICIES
from session.words import RefusalReason
from tests.core.driver import FakeWorker
from tests.core.oracle import Oracle
from tests.core.test_cases_pages import make, span, spare
from tests.core.world import ABORTED, NS, World, full, pack, window


def cached(worker: FakeWorker, tokens: list[int]) -> int:
    return worker.world.tokens_cached([*tokens, 0])


def take(worker: FakeWorker, num_pages: int) -> None:
    """Make the manager give that many pages to somebody who then leaves them empty."""
    (stats,) = worker.world.manager.stats().workers
    tokens = [8_000_000 + i for i in range((num_pages + stats.groups[0].num_free) * worker.page_tokens)]
    worker.release(worker.start(tokens, chunk=1), ABORTED)


def test_case_32_a_pinned_leaf_is_skipped_and_goes_after_release() -> None:
    worker = make(4, 2)
    live = worker.start([1, 2, 3, 4])
    worker.prefill(live)
    worker.run([5, 6, 7, 8])
    worker.refused(span(50, 56))
    worker.run(span(60, 63))
    assert cached(worker, [1, 2, 3, 4]) == 4
    worker.release(live)
    worker.run(span(70, 77))
    assert cached(worker, [1, 2, 3, 4]) == 0


def test_case_32_leaves_go_before_their_trunk() -> None:
    worker = make(4, 2)
    oracle = Oracle(worker)
    worker.run([1, 2, 3, 4, 5, 6])
    worker.run([1, 2, 3, 4, 7, 8])
    take(worker, 2)
    assert cached(worker, [1, 2, 3, 4]) == 4
    assert cached(worker, [1, 2, 3, 4, 5, 6]) == cached(worker, [1, 2, 3, 4, 7, 8]) == 4
    take(worker, 2)
    assert not oracle.resident[0]


def test_case_32_touched_while_pinned_is_young() -> None:
    worker = make(2, 2)
    old = worker.start([1, 2])
    worker.prefill(old)
    worker.run([3, 4])
    worker.release(old)
    take(worker, 1)
    assert (cached(worker, [1, 2]), cached(worker, [3, 4])) == (2, 0)


def test_case_32_e15_evictable_counts() -> None:
    worker = make(8, 2)
    worker.run([1, 2])
    worker.run([3, 4, 5, 6])

    def evictable() -> int:
        return worker.world.manager.stats().workers[0].groups[0].num_evictable

    assert evictable() == 3
    live = worker.start([1, 2, 9])
    assert live.grant.cached_tokens == 2
    assert evictable() == 2
    worker.release(live, ABORTED)
    assert evictable() == 3


def test_h15_m21_a_full_pool_keeps_what_it_hit() -> None:
    """S0 -> S1 is the oldest, SX is younger, nothing is free: the third page must come from SX."""
    worker = make(3, 2)
    worker.run([1, 2, 3, 4])
    worker.run([8, 9])
    live = worker.start([1, 2, 3, 4, 5])
    assert live.grant.cached_tokens == 4
    worker.prefill(live)
    assert cached(worker, [8, 9]) == 0


def test_h16_m23_leaves_go_first_and_a_bared_parent_is_young() -> None:
    """A -> B -> {C, F} and A -> D -> E: F, C and E go."""
    worker = make(6, 1)
    a, b, c, d, e, f = range(1, 7)
    worker.run([a, b, f])
    worker.run([a, b, c])
    worker.run([a, d, e])
    take(worker, 3)
    assert [cached(worker, path) for path in ([a, b, f], [a, b, c], [a, d, e])] == [2, 2, 2]
    take(worker, 3)
    assert cached(worker, [a]) == 0
    assert worker.refused(span(10, 16)).reason == RefusalReason.NEVER_FITS


def test_e1_refs_hits_and_a_full_sweep() -> None:
    worker = make(10, 16)
    common = span(1, 48)
    r0 = worker.start([*common, *span(100, 106)])
    assert r0.grant.cached_tokens == 0 and len(r0.table()) == 4
    worker.prefill(r0)
    r1 = worker.start([*common, *span(200, 204)])
    assert r1.grant.cached_tokens == 48 and r1.table()[:3] == r0.table()[:3]
    assert spare(worker) == 5
    worker.prefill(r1)
    worker.release(r0)
    worker.release(r1)
    assert spare(worker) == 10
    r2 = worker.start([*common, *span(300, 305)])
    assert r2.grant.cached_tokens == 48
    worker.release(r2)
    r3 = worker.start([99] * 160)
    assert r3.grant.cached_tokens == 0 and sorted(r3.table()) == span(1, 10)
    assert cached(worker, common) == 0


def test_e2_a_shorter_prompt_finds_its_pages() -> None:
    worker = make(10, 16)
    r0, r1 = worker.start(span(1, 90)), worker.start(span(1001, 1048))
    worker.prefill(r0)
    worker.prefill(r1)
    first = r0.table()
    worker.release(r0)
    worker.release(r1)
    r2 = worker.start(span(1, 35))
    assert r2.grant.cached_tokens == 32 and r2.table()[:2] == first[:2]
    assert spare(worker) == 7


def test_e3_the_hit_is_never_the_victim() -> None:
    worker = make(2, 2)
    worker.run([1, 2, 3, 4])
    live = worker.start([1, 2, 5, 6])
    assert live.grant.cached_tokens == 2
    worker.prefill(live)
    assert cached(worker, [1, 2, 3, 4]) == 2


def test_e4_r4_a_reused_page_loses_its_identity() -> None:
    worker = make(1, 16)
    worker.run(span(1, 16))
    live = worker.start(span(50, 64))
    assert cached(worker, span(1, 16)) == 0
    worker.prefill(live)
    worker.release(live)
    assert cached(worker, span(1, 16)) == 0


def test_e5_hits_that_must_be_pinned_again_are_no_room() -> None:
    worker = make(10, 16)
    common = span(1, 48)
    r0 = worker.start(common)
    worker.prefill(r0)
    worker.run([*common, *span(101, 148)])
    worker.start(span(900, 931))
    before = worker.world.snapshot()
    assert worker.refused([*common, *span(101, 148), *span(201, 248)]).reason == RefusalReason.NO_ROOM
    assert worker.world.snapshot() == before


def test_e13_e14_splits_and_partial_pages() -> None:
    worker = make(32, 1)
    worker.run(span(1, 8))
    worker.run([1, 2, 9, 10])
    (stats,) = worker.world.manager.stats().workers
    assert stats.groups[0].num_evictable == 10
    before = worker.world.snapshot()
    assert worker.world.tokens_cached([1, 2, 3, 4, 999, 1000]) == 4
    assert worker.world.tokens_cached([*span(1, 6), 777, 888]) == 6
    assert worker.world.snapshot() == before
    assert cached(worker, span(1, 8)) == 8
    paged = make(8, 4)
    paged.run(span(1, 6))
    assert cached(paged, span(1, 6)) == 4


def test_e16_no_path_through_a_request_leaks() -> None:
    worker = make(8, 1)
    for publish in (True, False):
        for i in range(5):
            live = worker.start([1, 2, 3, 10 + i, 20 + i])
            if publish:
                worker.prefill(live)
            worker.release(live, ABORTED)
            assert spare(worker) == 8


def test_e17_window_pages_alone_may_go() -> None:
    """Pressure on the window's pool takes no FULL page; taking FULL pages takes the window's along."""
    worker = FakeWorker(World(watch=True), [full(32), window(8, 4)], 1)
    oracle = Oracle(worker)
    worker.run([1, 2, 3])
    worker.run(span(40, 47))
    assert [p for g, pages in enumerate(oracle.removed) if g == 0 for p in pages] == []
    assert worker.world.manager.stats().workers[0].groups[0].num_evicted == 0
    assert worker.world.tokens_cached([1, 2, 3, 4]) == 0
    worker.run(span(60, 63))
    take(worker, 15)
    assert not oracle.resident[0] and not oracle.resident[1]
    oracle.check()


def test_e26_one_page_of_a_long_leaf() -> None:
    worker = make(2000, 1)
    oracle = Oracle(worker)
    worker.run(span(1, 2000))
    take(worker, 1)
    assert len(oracle.resident[0]) == 1999
    assert cached(worker, span(1, 2000)) == 1999


def test_e27_a_chain_loses_its_tail() -> None:
    worker = make(3, 2)
    worker.run(span(1, 6))
    take(worker, 1)
    assert cached(worker, span(1, 6)) == 4


def test_e28_higher_priority_survives() -> None:
    worker = FakeWorker(World(watch=True, policy="priority"), [full(8)], 2)
    worker.run([1, 2, 3, 4], priority=5)
    for first in (10, 20, 30, 40, 50):
        worker.run(span(first, first + 3), priority=0)
    assert cached(worker, [1, 2, 3, 4]) == 4
    take(worker, 8)
    assert cached(worker, [1, 2, 3, 4]) == 0


@pytest.mark.parametrize("policy", list(POLICIES))
def test_exactly_the_missing_pages_go(policy: str) -> None:
    worker = FakeWorker(World(watch=True, policy=policy), [full(12)], 2)
    oracle = Oracle(worker)
    for first in range(10, 60, 10):
        worker.run(span(first, first + 3))
    for count in (1, 2, 3):
        before = len(oracle.resident[0])
        take(worker, count)
        assert before - len(oracle.resident[0]) == count
    oracle.check()


def test_slru_keeps_what_was_used_twice() -> None:
    worker = FakeWorker(World(watch=True, policy="slru"), [full(10)], 2)
    worker.run([1, 2, 3, 4])
    worker.run([1, 2, 3, 4, 5])
    for first in range(10, 100, 10):
        worker.run(span(first, first + 3))
    assert cached(worker, [1, 2, 3, 4]) == 4


@pytest.mark.parametrize("policy", list(POLICIES))
def test_pinned_prefixes_go_last_and_never_block(policy: str) -> None:
    world = World(watch=True, policy=policy)
    worker = FakeWorker(world, [full(4)], 2)
    worker.run([1, 2, 3, 4])
    assert world.manager.pin(NS, pack([1, 2, 3, 4]), 1000, world.now_ms) == 4
    worker.run([5, 6])
    worker.run([7, 8])
    worker.run([9, 10])
    assert cached(worker, [1, 2, 3, 4]) == 4
    worker.release(worker.start(span(20, 27)), ABORTED)
    assert cached(worker, [1, 2, 3, 4]) == 0, "a soft pin never blocks"


def test_a_pin_ends_with_its_time_or_by_zero() -> None:
    for unpin in (False, True):
        world = World(watch=True)
        worker = FakeWorker(world, [full(4)], 2)
        worker.run([1, 2, 3, 4])
        world.manager.pin(NS, pack([1, 2, 3, 4]), 1000, world.now_ms)
        if unpin:
            world.manager.pin(NS, pack([1, 2, 3, 4]), 0, world.now_ms)
            world.settle()
        else:
            world.tick(1001)
        worker.run([5, 6, 7, 8])
        take(worker, 2)
        assert (cached(worker, [1, 2, 3, 4]), cached(worker, [5, 6, 7, 8])) == (0, 4)


def test_ghosts_are_bounded() -> None:
    worker = make(4, 2)
    for i in range(40):
        worker.run(span(100 * i, 100 * i + 7))
    (stats,) = worker.world.manager.stats().workers
    assert 0 < stats.num_ghost_pages <= 4 * 4


SCRIPT = "from tests.core.test_cases_eviction import trail; print(trail())"


def trail() -> list[str]:
    """Every removal of a short, busy life, in order."""
    out = []
    for policy in POLICIES:
        world = World(watch=True, policy=policy)
        worker = FakeWorker(world, [full(10), window(10, 4)], 2)
        for i in range(60):
            live = worker.submit([i * i % 7, i % 3, i % 5, 1, i % 2, i % 4], priority=i % 2)
            if not hasattr(live, "grant"):
                continue
            worker.prefill(live)  # type: ignore[arg-type]
            worker.release(live)  # type: ignore[arg-type]
        out += [repr(event) for event in world.events]
    return out


def test_order_does_not_depend_on_pythonhashseed() -> None:
    root = Path(__file__).parents[2]
    seen = set()
    for seed in ("0", "1", "4242"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, cwd=root, capture_output=True, text=True, check=True
        )
        seen.add(done.stdout)
    assert len(seen) == 1
    assert "Removed" in seen.pop()
