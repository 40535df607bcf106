"""The host tier's rules: which pages are spilled when, what a fetch must save, quota, breaker, restarts, ranks."""

from __future__ import annotations

import pytest

from cache_service.core.base.page_hash import namespace_digest, page_hashes
from cache_service.core.base.types import FetchPolicy, SpillPolicy
from cache_service.core.host.host_key import HostKey, build_key
from cache_service.core.verbs import spilling
from session.messages import Rates
from session.words import HostTierKind, PageHash
from tests.core.at_once import clear_at_once
from tests.core.driver import FakeWorker
from tests.core.host_stage import churn, join, spill, stage, warm
from tests.core.test_cases_pages import span
from tests.core.world import ABORTED, FAILED, FINGERPRINT, NS, full, pack, window


def test_selective_spills_after_the_second_use() -> None:
    world = stage(spill=SpillPolicy.SELECTIVE)
    worker = join(world, full(8))
    worker.run(span(1, 8))
    world.tick()
    assert not worker.spills
    worker.run([*span(1, 8), 9])
    world.tick()
    assert worker.spills
    worker.spill_all()
    assert len(worker.store) >= 4


def test_auto_fetch_weighs_measured_rates() -> None:
    world = stage(fetch=FetchPolicy.AUTO)
    first, second = join(world, full(16)), join(world, full(16), name="w1")
    first.run(span(1, 8))
    spill(first)
    unknown = second.start(span(1, 10))
    assert unknown.fetch is not None, "until rates are known a fetch is granted"
    second.release(unknown, ABORTED)
    second.ack_orphan(next(iter(second.orphans)))
    clear_at_once(world.manager, None, True)
    world.settle()
    first.run([*span(1, 8), 1])
    spill(first)
    second.rates = Rates(prefill_tokens_per_s=1e9, fetch_bytes_per_s=1.0)
    quick = second.start(span(1, 10))
    assert quick.fetch is None
    second.release(quick, ABORTED)
    second.rates = Rates(prefill_tokens_per_s=1.0, fetch_bytes_per_s=1e12)
    assert second.start(span(1, 10)).fetch is not None


def test_quota_drops_the_least_recent_rows_and_deletes_their_keys() -> None:
    world = stage(host_quota_bytes=64 * 6)
    worker = join(world, full(32))
    for first in (100, 200, 300):
        worker.run(span(first, first + 7))
        spill(worker)
    tier = world.manager.stats().host_tier
    assert tier.num_bytes <= 64 * 6 and tier.num_rows == 6
    assert len(worker.store) == 6
    clear_at_once(world.manager, None, True)
    world.settle()


def test_lost_tier_drops_its_rows_at_once() -> None:
    world = stage()
    worker = warm(world, full(6))
    world.manager.host_lost("redis")
    worker.store.clear()
    world.settle()
    assert worker.start(span(1, 10)).fetch is None
    assert world.manager.stats().host_tier.num_rows == 0


def test_breaker_stops_fetches_and_lets_them_again() -> None:
    world = stage(breaker_failures=2, breaker_ms=1000)
    worker = warm(world, full(6))
    for _ in range(2):
        world.manager.tiers.report_failure("redis", world.now_ms)
    world.settle()
    live = worker.start(span(1, 10))
    assert live.fetch is None
    worker.release(live, ABORTED)
    world.manager.tiers.report_ok("redis")
    world.tick(2000)
    assert worker.start(span(1, 10)).fetch is not None


def test_spills_wait_while_the_tier_fails_and_follow_when_it_is_back() -> None:
    world = stage(breaker_failures=2, breaker_ms=1000)
    worker = join(world, full(40))
    prompts = [span(first, first + 7) for first in (1, 20, 40)]
    for _ in range(2):
        world.manager.tiers.report_failure("redis", world.now_ms)
    for prompt in prompts:
        worker.run(prompt)
    world.tick()
    assert not worker.spills, "the breaker is open"
    world.tick(1000)
    assert len(worker.spills) == 1, "one order tries whether the tier is back"
    worker.do_spill()
    assert len(worker.spills) == 2, "it is: the others follow at once"
    worker.spill_all()
    assert len(worker.store) == 12
    churn(worker)
    for prompt in prompts:
        live = worker.start([*prompt, 9])
        assert live.fetch is not None and live.fetch.num_pages == 4
        worker.fetch_all(live)
        worker.prefill(live)
        worker.release(live)


def test_a_store_that_takes_nothing_stops_spills_and_no_fetch() -> None:
    """A full one: each worker asks it once in a pause, and what waits then goes there when it has room."""
    world = stage(breaker_failures=2, breaker_ms=1000)
    worker, other = warm(world, full(40)), join(world, full(40), name="w1")
    for pause in range(3):
        worker.run(span(20 + 20 * pause, 27 + 20 * pause))
        world.tick(1000)
        while worker.spills:
            worker.do_spill(num_done=0, status=FAILED)
        live = worker.start(span(1, 10))
        assert live.fetch is not None
        worker.release(live, ABORTED)
        other.run(span(120 + 20 * pause, 127 + 20 * pause))
        world.tick()
        other.spill_all()
    for first in (200, 220, 240):
        worker.run(span(first, first + 7))
    num_stored = len(worker.store)
    world.tick(1000)
    assert len(worker.spills) == 1, "one order tries whether there is room"
    worker.spill_all()
    assert len(worker.store) >= num_stored + 12


def test_few_spills_wait_for_a_tier_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spilling, "MAX_QUEUED_NODES", 2)
    world = stage(breaker_failures=1, breaker_ms=1000)
    worker = join(world, full(40))
    world.manager.tiers.report_failure("redis", world.now_ms)
    for first in (1, 20, 40):
        worker.run(span(first, first + 7))
    world.tick()
    world.manager.tiers.report_ok("redis")
    world.tick()
    worker.spill_all()
    assert len(worker.store) == 8, "what was queued first is dropped"


def test_rows_found_after_a_restart_are_adopted() -> None:
    world = stage()
    worker = warm(world, full(6))
    keys = tuple(worker.store)
    world.new_manager()
    worker.restart("i1")
    before = world.snapshot()
    assert world.manager.tiers.add_scanned("redis", FINGERPRINT, (b"nonsense", b"")) == 0
    assert world.snapshot() == before
    assert world.manager.tiers.add_scanned("redis", FINGERPRINT, keys) == 4
    live = worker.start(span(1, 10))
    assert live.fetch is not None and live.fetch.num_pages == 4
    worker.fetch_all(live)
    worker.prefill(live)


def test_nothing_is_spilled_before_the_scan_has_found_what_the_store_has() -> None:
    world = stage(scans_host_tiers=True)
    worker = join(world, full(20))
    world.manager.tiers.end_scan("redis", FINGERPRINT)
    worker.run(span(1, 8))
    spill(worker)
    keys = tuple(worker.store)
    assert len(keys) == 4
    world.new_manager()
    worker.restart("i1")
    worker.run(span(1, 12))
    world.tick()
    assert not worker.spills
    assert world.manager.tiers.add_scanned("redis", FINGERPRINT, keys) == 4
    world.tick()
    assert not worker.spills, "only a part has been found"
    world.manager.tiers.end_scan("redis", FINGERPRINT)
    world.tick()
    ((order, _),) = worker.spills
    assert (order.first_page, order.num_pages) == (4, 2)
    worker.spill_all()
    assert len(worker.store) == 6


def test_what_was_split_while_it_waited_is_spilled_whole() -> None:
    world = stage(scans_host_tiers=True)
    worker = join(world, full(30))
    worker.run(span(1, 8))
    worker.run([*span(1, 4), *span(50, 53)])  # its node is cut in two, and both wait
    world.tick()
    assert not worker.spills
    world.manager.tiers.end_scan("redis", FINGERPRINT)
    spill(worker)
    assert len(worker.store) == 6


def test_a_tier_that_nobody_scans_keeps_no_spill_waiting() -> None:
    world = stage(scans_host_tiers=True)
    private = FakeWorker(world, [full(8)], 2, host_tier=HostTierKind.PRIVATE)
    private.run(span(1, 8))
    spill(private)
    assert len(private.store) == 4


def test_a_use_during_a_spill_counts() -> None:
    """The copy itself is no use, but a request that came and went meanwhile is."""
    world = stage()
    worker = join(world, full(6))
    worker.run([1, 2, 3, 4])
    world.tick()
    assert worker.spills
    worker.run([5, 6])
    worker.run([1, 2, 3, 4, 5])
    spill(worker)
    take = worker.start(span(70, 77))
    worker.release(take, ABORTED)
    assert world.tokens_cached([1, 2, 3, 4, 0]) == 4
    assert world.tokens_cached([5, 6, 0]) == 0


def test_the_copy_itself_is_no_use() -> None:
    world = stage()
    worker = join(world, full(4))
    worker.run([1, 2])
    worker.run([5, 6])
    spill(worker)
    worker.release(worker.start(span(70, 75)), ABORTED)
    assert (world.tokens_cached([1, 2, 0]), world.tokens_cached([5, 6, 0])) == (0, 2)


def test_a_row_of_several_ranks_is_whole_or_absent() -> None:
    """A scan may find the keys of some ranks only."""
    world = stage()
    worker = FakeWorker(world, [full(8)], 2, host_tier=HostTierKind.SHARED, host_tier_id="redis", num_ranks=2)
    page_hash = page_hashes(namespace_digest(NS), b"", pack([1, 2]), 8)
    keys = [build_key(HostKey(FINGERPRINT, 0, rank, PageHash(page_hash))) for rank in (0, 1, 2)]
    add_scanned = world.manager.tiers.add_scanned
    assert add_scanned("redis", FINGERPRINT, keys[:1]) == 0
    assert worker.start([1, 2, 3]).fetch is None
    assert add_scanned("redis", FINGERPRINT, keys[:1]) == 0
    assert add_scanned("redis", FINGERPRINT, keys[2:]) == 0
    assert add_scanned("redis", FINGERPRINT, keys[1:2]) == 1
    assert worker.start([1, 2, 3]).fetch is not None


def test_a_long_spill_comes_in_orders_of_limited_size() -> None:
    world = stage(transfer_pages=3)
    worker = join(world, full(16))
    worker.run(span(1, 20))
    sizes = []
    for _ in range(10):
        world.tick()
        if not worker.spills:
            break
        sizes.append(worker.spills[0][0].num_pages)
        worker.do_spill()
    assert sum(sizes) == 10 and max(sizes) <= 3
    assert len(worker.store) == 10


def test_write_back_spills_the_cold_end_before_it_is_needed() -> None:
    world = stage(spill=SpillPolicy.WRITE_BACK, write_back_low_water=0.5)
    worker = join(world, full(8))
    worker.run([1, 2, 3, 4])
    world.tick()
    assert not worker.spills, "there is room enough"
    worker.run([5, 6, 7, 8, 9, 10])
    spill(worker)
    assert len(worker.store) >= 2
    churn(worker)
    live = worker.start([1, 2, 3, 4, 5])
    assert live.fetch is not None
    worker.fetch_all(live)
    worker.prefill(live)


def test_pages_that_no_resume_needs_are_not_spilled() -> None:
    """A window of one token reads no page before a boundary, one of two the last page."""
    world, groups = stage(), (full(16), window(16, 1, "one"), window(16, 2, "two"))
    first, second = join(world, *groups), join(world, *groups, name="w1")
    first.run(span(1, 8))
    world.tick()
    assert [part.group for part in first.spills[0][0].groups] == [0, 2]
    first.spill_all()
    assert len(first.store) == 4 + 4
    live = second.start(span(1, 10))
    assert live.fetch is not None and {part.group for part in live.fetch.groups} == {0, 2}
    second.fetch_all(live)
    assert live.grant.usable_tokens == 8
    second.prefill(live)


def test_a_model_of_such_windows_alone_spills_nothing() -> None:
    world = stage()
    worker = join(world, window(16, 1))
    worker.run(span(1, 8))
    world.tick()
    assert not worker.spills
    again = worker.start(span(1, 10))
    assert (again.grant.usable_tokens, again.fetch) == (8, None)
