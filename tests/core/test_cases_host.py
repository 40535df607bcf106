"""Acceptance cases 5, 33-37, E25 and the host tier's rules: spill, fetch, missing pages, aborts, quota, breaker.

Knows nothing beyond the driver, whose mover works only when told and whose store the tests may damage.
"""

from __future__ import annotations

from typing import Any

import pytest

from cache_service.core.errors import LeasesInScope, UnknownTicket
from cache_service.core.host_key import HostKey, build_key
from cache_service.core.page_hash import namespace_digest, page_hashes
from cache_service.core.types import (
    Ack,
    FetchPolicy,
    GroupSpec,
    HostTierKind,
    Namespace,
    PageHash,
    Rates,
    SpillPolicy,
    TicketId,
)
from tests.core.driver import FakeWorker
from tests.core.oracle import Oracle
from tests.core.test_cases_pages import span, spare
from tests.core.world import ABORTED, DONE, FAILED, FINGERPRINT, MISSING, NS, World, full, ids, pack, state, window


def stage(**config: Any) -> World:
    options = {"spill": SpillPolicy.WRITE_THROUGH, "fetch": FetchPolicy.ALWAYS, "watch": True}
    return World(**(options | config))


def join(world: World, *groups: GroupSpec, page: int = 2, name: str = "w0", tier: str = "redis") -> FakeWorker:
    return FakeWorker(world, groups, page, name, host_tier=HostTierKind.SHARED, host_tier_id=tier)


def spill(worker: FakeWorker) -> None:
    worker.world.tick()
    worker.spill_all()


def churn(worker: FakeWorker) -> None:
    """Push everything that is not held off the device, and let nothing of it reach the host tier."""
    pages = min(spec.num_pages for spec in worker.groups if spec.kind != 3)
    live = worker.start([7000 + i for i in range(pages * worker.page_tokens)])
    worker.launch(live)
    worker.release(live, ABORTED)


def warm(world: World, *groups: GroupSpec, tokens: list[int] | None = None) -> FakeWorker:
    """One prompt of eight tokens in the host tier and nothing on the device."""
    worker = join(world, *groups)
    worker.run(tokens or span(1, 8))
    spill(worker)
    churn(worker)
    assert world.tokens_cached([*span(1, 8), 9, 10]) == 0
    return worker


def test_case_33_a_host_hit_brings_what_the_rules_need() -> None:
    worker = warm(stage(), full(6), window(6, 4))
    before = spare(worker, 0), spare(worker, 1)
    live = worker.start(span(1, 10))
    fetch = live.fetch
    assert fetch is not None and (fetch.first_page, fetch.num_pages) == (0, 4)
    moved = {part.group: [bool(page) for page in ids(part.page_ids)] for part in fetch.groups}
    assert moved == {0: [True] * 4, 1: [False, False, True, True]}
    worker.do_fetch(live)
    grant = live.grant
    assert grant.fetch is None
    assert (grant.usable_tokens, grant.cached_tokens, grant.fetched_tokens) == (8, 0, 8)
    assert worker.extend(live, 11)
    assert before[0] - spare(worker, 0) == 6
    assert before[1] - spare(worker, 1) == 4
    worker.prefill(live)


def test_case_34_abort_while_loading_keeps_the_targets_until_the_ack() -> None:
    worker = warm(stage(), full(6))
    oracle = Oracle(worker)
    live = worker.start(span(1, 10))
    fetch = live.fetch
    assert fetch is not None
    worker.release(live, ABORTED)
    oracle.check()
    assert spare(worker) == 2
    worker.refused(span(50, 60))
    worker.ack_orphan(fetch.ticket)
    assert spare(worker) == 6
    oracle.check()
    duplicate = Ack(fetch.ticket, 4, DONE)
    before = worker.world.snapshot()
    worker.step(acks=[duplicate])
    assert worker.world.snapshot() == before
    worker.prefill(worker.start(span(50, 60)))


def test_case_34_a_duplicate_ack_of_a_done_fetch_changes_nothing() -> None:
    worker = warm(stage(), full(6))
    live = worker.start(span(1, 10))
    fetch = live.fetch
    assert fetch is not None
    worker.do_fetch(live)
    before = worker.world.snapshot()
    reply = worker.step(acks=[Ack(fetch.ticket, fetch.num_pages, DONE)])
    assert not reply.grants and not reply.refusals
    assert worker.world.snapshot() == before
    worker.prefill(live)


def test_case_35_nothing_is_in_the_index_before_the_ack() -> None:
    world = stage()
    first, second = join(world, full(8)), join(world, full(8), name="w1")
    first.run(span(1, 8))
    world.tick()
    assert first.spills
    probe = second.start(span(1, 10))
    assert probe.fetch is None and probe.grant.match.host_tokens == 0
    second.release(probe, ABORTED)
    first.spill_all()
    probe = second.start(span(1, 10))
    assert probe.fetch is not None and probe.fetch.num_pages == 4
    second.fetch_all(probe)
    assert probe.grant.fetched_tokens == 8
    second.prefill(probe)


def test_case_35_a_page_is_spilled_once() -> None:
    world = stage()
    first, second = join(world, full(8)), join(world, full(8), name="w1")
    first.run(span(1, 8))
    second.run(span(1, 8))
    world.tick()
    first.spill_all()
    second.spill_all()
    first.run(span(1, 8))
    world.tick()
    assert not first.spills and not second.spills
    assert world.manager.stats().host_tier.num_rows == len(first.store) == 4


def test_case_35_a_full_store_takes_the_leading_pages() -> None:
    world = stage()
    first, second = join(world, full(8)), join(world, full(8), name="w1")
    first.run(span(1, 8))
    world.tick()
    first.do_spill(num_done=2, status=FAILED)
    first.spills.clear()
    live = second.start(span(1, 10))
    assert live.fetch is not None and live.fetch.num_pages == 2
    second.fetch_all(live)
    assert live.grant.fetched_tokens == 4
    second.prefill(live)


def test_case_35_abort_during_a_spill_waits_for_the_ack() -> None:
    world = stage()
    worker = join(world, full(4))
    live = worker.start(span(1, 8))
    worker.prefill(live)
    world.tick()
    worker.release(live, ABORTED)
    assert worker.spills
    worker.refused(span(50, 57))
    worker.spill_all()
    worker.prefill(worker.start(span(50, 57)))


@pytest.mark.parametrize("status", [MISSING, FAILED])
def test_case_36_a_failed_load_is_computed(status: Any) -> None:
    worker = warm(stage(breaker_failures=1), full(6))
    live = worker.start(span(1, 10))
    rounds = 0
    while live.fetch is not None:
        worker.do_fetch(live, 0, status)
        rounds += 1
        assert rounds < 10
    assert live.grant.usable_tokens == 0 and live.grant.fetched_tokens == 0
    assert worker.world.tokens_cached(span(1, 9)) == 0
    worker.prefill(live)
    assert worker.world.tokens_cached(span(1, 9)) == 8


def test_case_36_a_failed_store_is_no_row() -> None:
    world = stage()
    worker = join(world, full(8))
    worker.run(span(1, 8))
    world.tick()
    worker.do_spill(num_done=0, status=FAILED)
    assert world.manager.stats().host_tier.num_rows == 0


def test_case_36_clear_with_live_requests_is_refused() -> None:
    world = stage()
    worker = join(world, full(8))
    live = worker.start(span(1, 8))
    worker.prefill(live)
    error = world.unchanged(world.manager.clear, None, False, world.now_ms)
    assert isinstance(error, LeasesInScope)
    assert world.tokens_cached(span(1, 9)) == 8
    worker.release(live)
    spill(worker)
    cleared = world.manager.clear(None, False, world.now_ms)
    world.settle()
    assert (cleared.num_pages, cleared.num_host_rows) == (4, 4)
    assert worker.start(span(1, 9)).grant.usable_tokens == 0


def test_case_5_a_tampered_value_is_a_miss_from_there_on() -> None:
    worker = warm(stage(), full(6))
    live = worker.start(span(1, 10))
    assert live.fetch is not None
    del worker.store[live.fetch.groups[0].keys[1]]
    worker.fetch_all(live)
    assert live.grant.usable_tokens == 2
    worker.prefill(live)


def test_case_37_unknown_tickets_change_nothing() -> None:
    world = stage()
    worker = join(world, full(8))
    before = world.snapshot()
    with pytest.raises(UnknownTicket):
        worker.step(acks=[Ack(TicketId(12345), 1, DONE)])
    assert world.snapshot() == before


def test_vanished_tail_is_replanned_round_by_round() -> None:
    worker = warm(stage(), full(6))
    live = worker.start(span(1, 10))
    assert live.fetch is not None
    keys = live.fetch.groups[0].keys
    for key in keys[2:]:
        worker.store.pop(key)
    worker.fetch_all(live)
    assert live.grant.usable_tokens == 4
    probe = worker.world.manager.match(NS, pack(span(1, 10)), worker.id)[0].match
    assert probe.host_tokens == 0
    worker.prefill(live)


def test_e25_all_kinds_come_back_bit_equal() -> None:
    world = stage()
    groups = (full(12), window(12, 4), state(8))
    first, second = join(world, *groups), join(world, *groups, name="w1")
    first.run(span(1, 9))
    spill(first)
    live = second.start(span(1, 12))
    assert live.fetch is not None
    second.fetch_all(live)
    assert live.grant.usable_tokens == 8 and live.grant.fetched_tokens == 8
    second.prefill(live)


def test_a_fetch_goes_on_from_the_device_hit() -> None:
    world = stage()
    first, second = join(world, full(16)), join(world, full(16), name="w1")
    first.run(span(1, 12))
    spill(first)
    second.run(span(1, 4))
    live = second.start(span(1, 14))
    assert live.fetch is not None and live.fetch.first_page == 2
    second.fetch_all(live)
    grant = live.grant
    assert (grant.cached_tokens, grant.fetched_tokens, grant.usable_tokens) == (4, 8, 12)


def test_e6_host_rows_do_not_cross_salts_tiers_or_models() -> None:
    world = stage()
    first = join(world, full(16))
    first.run(span(1, 8), namespace=Namespace("model", "", "salt1"))
    spill(first)
    same, other_tier = join(world, full(16), name="w1"), join(world, full(16), name="w2", tier="another")
    for namespace in (NS, Namespace("model", "", "salt2"), Namespace("model", "salt1", "")):
        probe = same.start(span(1, 10), namespace)
        assert probe.fetch is None and probe.grant.match.host_tokens == 0
        same.release(probe, ABORTED)
    assert other_tier.start(span(1, 10), Namespace("model", "", "salt1")).fetch is None
    assert same.start(span(1, 10), Namespace("model", "", "salt1")).fetch is not None


def test_private_rows_serve_their_worker_only() -> None:
    world = stage()
    first = FakeWorker(world, [full(4)], 2, "w0", host_tier=HostTierKind.PRIVATE)
    second = FakeWorker(world, [full(4)], 2, "w1", host_tier=HostTierKind.PRIVATE)
    first.run(span(1, 8))
    spill(first)
    churn(first)
    assert second.start(span(1, 8)).fetch is None
    live = first.start(span(1, 8))
    assert live.fetch is not None
    first.fetch_all(live)
    first.prefill(live)


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
    world.manager.clear(None, True, world.now_ms)
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
    world.manager.clear(None, True, world.now_ms)
    world.settle()


def test_lost_tier_drops_its_rows_at_once() -> None:
    world = stage()
    worker = warm(world, full(6))
    world.manager.host_lost("redis", world.now_ms)
    worker.store.clear()
    world.settle()
    assert worker.start(span(1, 10)).fetch is None
    assert world.manager.stats().host_tier.num_rows == 0


def test_breaker_stops_fetches_and_lets_them_again() -> None:
    world = stage(breaker_failures=2, breaker_ms=1000)
    worker = warm(world, full(6))
    for _ in range(2):
        world.manager.report_host_failure("redis", world.now_ms)
    world.settle()
    live = worker.start(span(1, 10))
    assert live.fetch is None
    worker.release(live, ABORTED)
    world.manager.report_host_ok("redis", world.now_ms)
    world.tick(2000)
    assert worker.start(span(1, 10)).fetch is not None


def test_rows_found_after_a_restart_are_adopted() -> None:
    world = stage()
    worker = warm(world, full(6))
    keys = tuple(worker.store)
    world.new_manager()
    worker.restart("i1")
    before = world.snapshot()
    assert world.manager.host_adopted("redis", FINGERPRINT, (b"nonsense", b""), world.now_ms) == 0
    assert world.snapshot() == before
    assert world.manager.host_adopted("redis", FINGERPRINT, keys, world.now_ms) == 4
    live = worker.start(span(1, 10))
    assert live.fetch is not None and live.fetch.num_pages == 4
    worker.fetch_all(live)
    worker.prefill(live)


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
    keys = [build_key(b"stemcache:1:", HostKey(FINGERPRINT, 0, rank, PageHash(page_hash))) for rank in (0, 1, 2)]
    adopt = world.manager.host_adopted
    assert adopt("redis", FINGERPRINT, keys[:1], world.now_ms) == 0
    assert worker.start([1, 2, 3]).fetch is None
    assert adopt("redis", FINGERPRINT, keys[:1], world.now_ms) == 0
    assert adopt("redis", FINGERPRINT, keys[2:], world.now_ms) == 0
    assert adopt("redis", FINGERPRINT, keys[1:2], world.now_ms) == 1
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
