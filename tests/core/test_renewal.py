"""Host copies of what is in use: they are renewed, written again when they are gone, and filled again after a flush."""

from __future__ import annotations

from typing import Any

import pytest

from cache_service.core.base.types import SpillPolicy
from cache_service.core.verbs import renewal
from cache_service.core.verbs.renewal import FRESH_MS
from tests.core.driver import FakeWorker
from tests.core.host_stage import churn, join, stage
from tests.core.test_cases_pages import span
from tests.core.world import ABORTED, World, full, keys

TTL, RENEW = 10_000, 2_500


def settled(worker: FakeWorker) -> None:
    while worker.world.tick() or worker.spills:
        worker.spill_all()
    worker.world.tick()


def written(**config: Any) -> FakeWorker:
    worker = join(stage(host_ttl_ms=TTL, host_renew_ms=RENEW, **config), full(40))
    worker.run(span(1, 8))
    settled(worker)
    assert rows(worker.world) == 4
    return worker


def rows(world: World) -> int:
    return world.manager.stats().host_tier.num_rows


def touched(world: World) -> list[bytes]:
    """What the world took away unseen is asked for before it does."""
    return list(world.manager.tiers.take_touches())


def test_device_hits_renew_their_rows_now_and_then() -> None:
    worker = written()
    world = worker.world
    names = list(worker.store)
    counts = []
    for _ in range(10):
        world.manager.tick(world.now_ms)
        world.now_ms += 1000
        live = worker.start([*span(1, 8), 0])
        worker.release(live)
        world.manager.tick(world.now_ms)
        counts.append(len(found := touched(world)))
        assert found in ([], names[::-1]), "tails before heads"
    assert 3 <= sum(map(bool, counts)) <= 5
    world.tick(TTL // 2)
    assert rows(world) == 4, "ten seconds and more after they were written"


def test_what_nobody_used_for_its_time_to_live_leaves_the_index() -> None:
    worker = written()
    worker.world.tick(TTL // 2)
    assert rows(worker.world) == 4
    worker.world.tick(TTL)
    assert rows(worker.world) == 0


def test_rows_that_are_gone_are_written_again_when_their_pages_are_used() -> None:
    worker = written()
    world = worker.world
    world.tick(TTL + 1)
    worker.store.clear()
    worker.run([*span(1, 8), 0, 0])
    settled(worker)
    assert rows(world) == len(worker.store) == 5


@pytest.mark.parametrize("spill", [SpillPolicy.WRITE_THROUGH, SpillPolicy.SELECTIVE])
def test_a_store_that_lost_everything_is_filled_again(spill: SpillPolicy) -> None:
    world = stage(spill=spill)
    worker = join(world, full(40))
    for _ in range(3):
        worker.run(span(1, 8))
    worker.run([*span(1, 4), 60, 61, 62, 63])
    settled(worker)
    before = set(worker.store)
    world.manager.host_lost("redis")
    worker.store.clear()
    settled(worker)
    assert before and set(worker.store) == before


def test_a_refill_goes_bit_by_bit_and_meets_a_changing_tree(monkeypatch: Any) -> None:
    monkeypatch.setattr(renewal, "NODES_PER_TICK", 1)
    monkeypatch.setattr(renewal, "REFILL_PAUSES_AT", 2)
    world = stage(max_open_tickets=1)
    worker = join(world, full(60))
    for first in range(0, 80, 20):
        worker.run(span(first, first + 9))
        settled(worker)
    world.manager.host_lost("redis")
    worker.store.clear()
    cache = world.manager.worker(worker.id)
    for first in range(0, 80, 20):
        world.tick()
        assert len(cache.spill_queue) <= 3
        worker.run([*span(first, first + 3), 99, 98, 97])  # splits a node that is still to be visited
        worker.spill_all()
    settled(worker)
    assert cache.refill is None
    assert rows(world) == len(worker.store) == 4 * (5 + 1)


def fetchable(worker: FakeWorker, tokens: list[int]) -> int:
    """Pages that a fetch would bring once nothing is on the device."""
    churn(worker)
    live = worker.start([*tokens, 0])
    num_pages = sum(fetch.num_pages for fetch in live.fetches)
    worker.fetch_all(live)
    worker.release(live, ABORTED)
    return num_pages


@pytest.mark.parametrize("transfer_pages", [1, 2, 64])
def test_of_a_prompt_that_is_spilled_in_several_orders_the_quota_drops_the_tail(transfer_pages: int) -> None:
    worker = join(stage(transfer_pages=transfer_pages, host_quota_bytes=64 * 12), full(30))
    worker.run(span(1, 16))
    settled(worker)
    worker.run(span(30, 41))
    settled(worker)
    assert rows(worker.world) == 12
    assert fetchable(worker, span(1, 16)) == 12 - 6


@pytest.mark.parametrize("chunk", [0, 2, 6])
def test_a_conversation_that_goes_on_is_dropped_from_its_end(chunk: int) -> None:
    worker = join(stage(transfer_pages=2, host_quota_bytes=64 * 14), full(40))
    for end in (8, 12, 20):
        worker.run(span(1, end), chunk=chunk)
        worker.world.tick(FRESH_MS)
        settled(worker)
    worker.run([*span(1, 8), 60, 61])
    settled(worker)
    worker.run(span(30, 41))
    settled(worker)
    assert rows(worker.world) == 14
    assert fetchable(worker, span(1, 20)) >= 6, "one tail or the other went"


def test_the_store_learns_the_order_of_a_long_prompt_and_not_of_each_turn() -> None:
    """A service that is started anew reads it from the times to live."""
    worker = join(stage(transfer_pages=2), full(40))
    world = worker.world
    worker.run(span(1, 8))
    worker.spill_all()
    world.manager.tick(world.now_ms)
    keys = list(worker.store)
    assert touched(world) == keys[::-1]
    world.tick(FRESH_MS)
    live = worker.start(span(1, 12))
    worker.prefill(live)
    worker.spill_all()
    world.manager.tick(world.now_ms)
    assert not set(touched(world)) & set(keys), "a command for each page of each earlier turn"


def test_the_store_learns_the_order_whatever_order_acks_come_in() -> None:
    worker = join(stage(transfer_pages=2), full(40))
    world = worker.world
    world.now_ms += 2 * FRESH_MS
    worker.run(span(1, 16))
    orders = [order for order, _ in worker.spills]
    assert [order.first_page for order in orders] == [0, 2, 4, 6]
    for _ in range(3):
        worker.do_spill(index=1)
    world.manager.tick(world.now_ms)
    names = [key for order in orders for key in keys(order.groups[0])]
    assert touched(world) == names[:1:-1], "all but the first order's, tails before heads"


def test_what_waits_for_its_renewal_may_be_evicted() -> None:
    worker = join(stage(transfer_pages=1), full(8))
    worker.run(span(1, 8))
    worker.spill_all()
    cache = worker.world.manager.worker(worker.id)
    assert cache.renewals
    worker.release(worker.start(span(50, 65)), ABORTED)
    assert not cache.renewals
    settled(worker)
