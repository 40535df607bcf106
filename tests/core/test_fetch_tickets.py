"""A fetch in several tickets: acked in any order, cut short, orphaned, limited, and a tier that goes away meanwhile."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from session.words import HostTierKind
from tests.core import audit
from tests.core.driver import FakeWorker
from tests.core.host_stage import churn, join, stage
from tests.core.oracle import Oracle
from tests.core.test_cases_pages import span, spare
from tests.core.world import ABORTED, CORRUPT, FAILED, MISSING, Live, full, keys, state, window

GROUPS = [
    (full(20), window(20, 6)),
    (full(20), state(6)),
    (full(20), window(9, 5), state(5)),
    (window(20, 6),),
    (window(20, 6), state(9)),
]


def fetching(*groups: Any, **config: Any) -> tuple[FakeWorker, Live]:
    """A sequence that waits for three tickets of two pages."""
    worker = join(stage(**({"transfer_pages": 2} | config)), *(groups or (full(8),)))
    worker.run(span(1, 12))
    while worker.world.tick() or worker.spills:
        worker.spill_all()
    churn(worker)
    live = worker.start(span(1, 14))
    return worker, live


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_acks_come_in_any_order(order: tuple[int, ...]) -> None:
    worker, live = fetching()
    assert [(fetch.first_page, fetch.num_pages) for fetch in live.fetches] == [(0, 2), (2, 2), (4, 2)]
    tickets = [live.fetches[at].ticket for at in order]
    for ticket in tickets:
        assert not worker.world.tokens_cached(span(1, 13)), "nothing is findable before the last ack"
        worker.do_fetch(live, index=[fetch.ticket for fetch in live.fetches].index(ticket))
    assert (live.grant.usable_tokens, live.grant.fetched_tokens) == (12, 12)
    worker.prefill(live)


@pytest.mark.parametrize("status", [MISSING, FAILED, CORRUPT])
@pytest.mark.parametrize(("bad", "num_done"), [(0, 0), (0, 1), (1, 1), (2, 0)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_what_arrived_before_a_gap_is_kept(status: Any, bad: int, num_done: int, order: tuple[int, ...]) -> None:
    worker, live = fetching(breaker_failures=1)
    oracle = Oracle(worker)
    fetches = list(live.fetches)
    for at in order:
        index = live.fetches.index(fetches[at])
        if at == bad:
            worker.do_fetch(live, num_done, status, index)
        else:
            worker.do_fetch(live, index=index)
    got = 2 * (2 * bad + num_done)
    if live.fetches:  # a row that is gone or bad was forgotten: what lies before it stays
        raise AssertionError("the tier has nothing more in a row")
    assert (live.grant.usable_tokens, live.grant.fetched_tokens) == (got, got)
    oracle.check()
    worker.prefill(live)
    tier = worker.world.manager.stats().host_tier
    assert (tier.num_missing_pages, tier.num_corrupt_pages) == (status == MISSING, status == CORRUPT)


def test_a_bad_page_leaves_index_and_store() -> None:
    worker, live = fetching()
    key = keys(live.fetches[1].groups[0])[1]
    worker.do_fetch(live)
    worker.do_fetch(live, 1, CORRUPT)
    worker.do_fetch(live)
    assert key not in worker.store
    assert live.grant.usable_tokens == 6


@pytest.mark.parametrize("num_acked", [0, 1, 2])
def test_open_tickets_keep_their_targets_after_an_abort(num_acked: int) -> None:
    worker, live = fetching(full(8), window(8, 4), state(4))
    before = spare(worker)
    oracle = Oracle(worker)
    for _ in range(num_acked):
        worker.do_fetch(live, index=1)
    worker.release(live, ABORTED)
    assert len(worker.orphans) == 3 - num_acked
    for ticket in list(worker.orphans):
        oracle.check()
        assert spare(worker) < 8
        worker.ack_orphan(ticket)
    oracle.check()
    assert spare(worker) == 8 and before < 8


def test_one_sequence_leaves_tickets_for_others() -> None:
    """Half of what is left each, and the rest of the pages in later rounds."""
    worker, live = fetching(full(40), max_open_tickets=4)
    assert len(live.fetches) == 2
    other = worker.start(span(1, 14))
    assert len(other.fetches) == 1
    worker.fetch_all(live)
    assert (live.grant.usable_tokens, live.grant.fetched_tokens) == (12, 12)
    worker.fetch_all(other)
    assert other.grant.usable_tokens == 12
    worker.prefill(live)
    worker.prefill(other)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_fetch_that_nobody_acknowledges_leaves_its_place_to_others_and_keeps_its_pages(is_aborted: bool) -> None:
    worker, late = fetching(full(16), max_open_tickets=1, max_spill_ms=1000, breaker_failures=1, breaker_ms=10)
    oracle = Oracle(worker)
    assert len(late.fetches) == 1
    if is_aborted:
        worker.release(late, ABORTED)
    worker.world.tick(999)
    tier = worker.world.manager.stats().host_tier
    assert not tier.breaker_open
    worker.world.tick(1)
    assert worker.world.manager.stats().host_tier.breaker_open, "the tier has failed"
    worker.world.tick(10)
    assert not worker.world.manager.stats().host_tier.breaker_open, "a late fetch fails once"
    other = worker.start(span(1, 14))
    assert len(other.fetches) == 1, "its place is free"
    oracle.check()
    worker.fetch_all(other)
    assert other.grant.usable_tokens == 12
    if is_aborted:
        (ticket,) = worker.orphans
        worker.ack_orphan(ticket)
    else:
        worker.fetch_all(late)
        assert late.grant.usable_tokens == 12
    oracle.check()


@pytest.mark.parametrize("groups", GROUPS)
def test_rounds_bring_windows_and_snapshots_too(groups: Any) -> None:
    worker, live = fetching(*groups, max_open_tickets=1)
    assert len(live.fetches) == 1
    worker.fetch_all(live)
    assert live.grant.usable_tokens == 12
    worker.prefill(live)


def test_a_window_of_one_has_nothing_to_fetch() -> None:
    """No page before a boundary is read, so a fetch would have no ticket whose ack lets the sequence run."""
    worker, live = fetching(window(20, 1))
    assert not live.fetches and live.grant.usable_tokens == 0
    worker.prefill(live)
    worker.release(live)


@pytest.mark.parametrize("tier", [HostTierKind.NONE, HostTierKind.PRIVATE, HostTierKind.SHARED])
def test_another_tier_in_a_later_hello_leaves_the_open_fetches(tier: HostTierKind) -> None:
    """What they bring is the same content, whatever tier it came from."""
    worker, live = fetching()
    worker.do_fetch(live)
    stores = worker.store
    worker.spills.clear()
    worker.host_tier, worker.host_tier_id = tier, "other" if tier == HostTierKind.SHARED else ""
    worker.hello()
    worker.store.update(stores)
    worker.do_fetch(live)
    worker.do_fetch(live)
    assert live.grant.usable_tokens == 12
    worker.prefill(live)
    worker.release(live)
    audit.check(worker.world.manager)


def test_a_worker_whose_tier_went_may_abort_a_fetch() -> None:
    worker, live = fetching()
    worker.spills.clear()
    worker.host_tier, worker.host_tier_id = HostTierKind.NONE, ""
    worker.hello()
    worker.release(live, ABORTED)
    for ticket in list(worker.orphans):
        worker.ack_orphan(ticket)
    assert spare(worker) == 8
