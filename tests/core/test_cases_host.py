"""The host tier: spill, fetch, missing pages, aborts, failures. The ids in test names are those of docs/cases.md."""

from __future__ import annotations

from typing import Any

import pytest

from cache_service.core.base.errors import LeasesInScope, UnknownTicket
from session.messages import Ack
from session.words import HostTierKind, Namespace, TicketId, TransferStatus
from tests.core.at_once import clear_at_once
from tests.core.driver import FakeWorker
from tests.core.host_stage import churn, join, spill, stage, warm
from tests.core.oracle import Oracle
from tests.core.test_cases_pages import span, spare
from tests.core.world import ABORTED, CORRUPT, DONE, FAILED, MISSING, NS, full, ids, keys, pack, state, window


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
    assert not grant.fetches
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
    error = world.unchanged(clear_at_once, world.manager, None, False)
    assert isinstance(error, LeasesInScope)
    assert world.tokens_cached(span(1, 9)) == 8
    worker.release(live)
    spill(worker)
    cleared = clear_at_once(world.manager, None, False)
    world.settle()
    assert (cleared.num_pages, cleared.num_host_rows) == (4, 4)
    assert worker.start(span(1, 9)).grant.usable_tokens == 0


def test_case_5_a_tampered_value_is_a_miss_from_there_on() -> None:
    worker = warm(stage(), full(6))
    live = worker.start(span(1, 10))
    assert live.fetch is not None
    del worker.store[keys(live.fetch.groups[0])[1]]
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
    for key in keys(live.fetch.groups[0])[2:]:
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


@pytest.mark.parametrize(
    ("tier", "status", "num_left"),
    [
        (HostTierKind.PRIVATE, MISSING, 1),
        (HostTierKind.PRIVATE, CORRUPT, 3),
        (HostTierKind.SHARED, MISSING, 3),
    ],
)
def test_behind_a_page_that_a_private_tier_dropped_nothing_is_left(
    tier: HostTierKind, status: TransferStatus, num_left: int
) -> None:
    """It drops the ends of prompts first. Were each page's row to be missed by a fetch, as many fetches would miss."""
    world = stage()
    identity = "tier-1" if tier is HostTierKind.SHARED else ""
    worker = FakeWorker(world, [full(6)], 2, "w0", host_tier=tier, host_tier_id=identity)
    worker.run(span(1, 8))
    spill(worker)
    churn(worker)
    num_rows = world.manager.stats().host_tier.num_rows
    live = worker.start(span(1, 10))
    assert live.fetch is not None and live.fetch.num_pages == 4
    worker.do_fetch(live, 1, status)
    stats = world.manager.stats().host_tier
    assert stats.num_rows == num_rows - 4 + num_left
    assert stats.num_missing_pages + stats.num_corrupt_pages == 1
    while live.fetch is not None:
        worker.do_fetch(live, 0, MISSING)
    worker.prefill(live)
    world.tick()


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
