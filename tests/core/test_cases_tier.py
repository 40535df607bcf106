"""More about the host tier: races of acks with releases, whose tickets and rows are whose, which rows outlive which."""

from __future__ import annotations

import contextlib

import pytest

from cache_service.core.base.types import FetchPolicy, Residence
from session.errors import FieldError
from session.messages import Ack, Acquire, Extend, Publish, Release, Step
from session.words import HostTierKind, MissReason, SequenceId, TicketId
from tests.core.at_once import explain_at_once
from tests.core.driver import FakeWorker
from tests.core.host_stage import churn, join, spill, stage, warm
from tests.core.oracle import Oracle
from tests.core.test_cases_pages import span, spare
from tests.core.world import ABORTED, DONE, FAILED, MISSING, NS, PREEMPTED, Live, full, ids, keys, pack, state, window


@pytest.mark.parametrize(("num_done", "status"), [(4, DONE), (2, MISSING), (0, FAILED)])
def test_an_abort_that_crosses_its_ack(num_done: int, status: object) -> None:
    """The ack is applied first, then the release: nothing is held afterwards, and what was proven stays."""
    worker = warm(stage(), full(6))
    oracle = Oracle(worker)
    live = worker.start(span(1, 10))
    assert live.fetch is not None
    worker.read_host(live.fetch, num_done)
    ack = Ack(live.fetch.ticket, num_done, status)  # type: ignore[arg-type]
    release = Release(SequenceId(live.id), ABORTED)
    reply = worker.step(acks=[ack], releases=[release])
    live.fetches.clear()
    worker.forget(live)
    assert not reply.refusals
    (stats,) = worker.world.manager.stats().workers
    assert stats.num_leases == 0
    for grant in reply.grants:
        worker.orphans.update((fetch.ticket, fetch) for fetch in grant.fetches)
    for ticket in list(worker.orphans):
        worker.ack_orphan(ticket)
    oracle.check()
    assert spare(worker) == 6
    assert worker.world.tokens_cached(span(1, 9)) == 2 * num_done


def test_a_sequence_may_be_released_and_acquired_in_one_step() -> None:
    worker = join(stage(), full(6))
    live = worker.start(span(1, 6))
    worker.launch(live)
    acquire = Acquire(SequenceId(live.id), NS, pack(span(1, 8)))
    reply = worker.step(
        publishes=[worker.publish_of(live)], releases=[Release(SequenceId(live.id), PREEMPTED)], acquires=[acquire]
    )
    worker.forget(live)
    again = worker.taken(acquire, reply)
    assert isinstance(again, Live) and again.grant.cached_tokens == 6
    worker.prefill(again)


def test_a_waiting_sequence_neither_runs_nor_grows() -> None:
    worker = warm(stage(), full(8))
    live = worker.start(span(1, 10))
    assert live.fetch is not None
    sequence = SequenceId(live.id)
    before = worker.world.snapshot()
    reply = worker.raw_step(publishes=[Publish(sequence, b"", 2)], extends=[Extend(sequence, 12)])
    fields = ["step.publishes[0].sequence_id", "step.extends[0].sequence_id"]
    assert [refusal.field for refusal in reply.refusals] == fields
    assert worker.world.snapshot() == before
    for wrong in (
        {"acks": [Ack(live.fetch.ticket, 5, DONE)]},
        {"acks": [Ack(live.fetch.ticket, -1, FAILED)]},
    ):
        before = worker.world.snapshot()
        with pytest.raises(FieldError):
            worker.step(**wrong)
        assert worker.world.snapshot() == before
    worker.fetch_all(live)
    worker.prefill(live)


def test_a_ticket_of_another_worker_is_not_ones_own() -> None:
    world = stage()
    first, second = join(world, full(8)), join(world, full(8), name="w1")
    first.run(span(1, 8))
    world.tick()
    ticket = first.spills[0][0].ticket
    before = world.snapshot()
    with contextlib.suppress(FieldError):
        second.step(acks=[Ack(ticket, 4, DONE)])
    assert world.snapshot() == before
    assert world.manager.stats().host_tier.num_rows == 0
    first.spill_all()
    with pytest.raises(FieldError):
        first.step(acks=[Ack(TicketId(2**40), 0, FAILED)])


def test_private_rows_die_with_their_incarnation() -> None:
    world = stage()
    worker = FakeWorker(world, [full(4)], 2, host_tier=HostTierKind.PRIVATE)
    worker.run(span(1, 8))
    spill(worker)
    assert world.manager.stats().host_tier.num_rows == 4
    worker.restart("i1")
    assert world.manager.stats().host_tier.num_rows == 0
    assert worker.start(span(1, 8)).fetch is None


def test_a_reconnect_with_another_store_forgets_the_old_rows() -> None:
    """The store was flushed: its identity is a new one."""
    worker = warm(stage(), full(6))
    worker.host_tier_id = "redis, flushed"
    worker.hello()
    assert worker.start(span(1, 10)).fetch is None


def test_heads_outlive_tails_under_a_quota() -> None:
    world = stage(host_quota_bytes=64 * 2)
    worker = join(world, full(6))
    worker.run(span(1, 8))
    spill(worker)
    churn(worker)
    live = worker.start(span(1, 10))
    assert live.fetch is not None and (live.fetch.first_page, live.fetch.num_pages) == (0, 2)
    worker.fetch_all(live)
    assert live.grant.fetched_tokens == 4


def test_touches_name_tails_before_heads() -> None:
    world = stage()
    worker = warm(world, full(6))
    live = worker.start(span(1, 10))
    assert live.fetch is not None
    names = keys(live.fetch.groups[0])
    worker.read_host(live.fetch)
    world.manager.tiers.take_touches()
    world.manager.step(worker.id, step_of(worker, live), world.now_ms)
    touched = [key for key in world.manager.tiers.take_touches() if key in names]
    assert touched == names[::-1]


def step_of(worker: FakeWorker, live: Live) -> Step:
    assert live.fetch is not None
    return Step(worker.step_id + 1, acks=(Ack(live.fetch.ticket, live.fetch.num_pages, DONE),))


def test_open_fetches_are_limited() -> None:
    world = stage(max_open_tickets=2)
    worker = join(world, full(40))
    for first in (100, 200, 300):
        worker.run(span(first, first + 7))
        spill(worker)
    churn(worker)
    lives = [worker.start([*span(first, first + 7), 1]) for first in (100, 200, 300)]
    assert [live.fetch is not None for live in lives] == [True, True, False]
    for live in lives:
        worker.fetch_all(live)
        worker.prefill(live)


@pytest.mark.parametrize("kinds", [("full", "window"), ("full", "state"), ("full", "window", "state")])
def test_partly_resident_prefixes_take_only_what_is_missing(kinds: tuple[str, ...]) -> None:
    """FULL pages are still there, the window's or the snapshot went: the fetch brings only those."""
    specs = {"full": full(16), "window": window(4, 4), "state": state(3)}
    worker = join(stage(), *[specs[kind] for kind in kinds])
    worker.run(span(1, 8), chunk=4)
    spill(worker)
    other = worker.start(span(50, 57), chunk=4)
    worker.prefill(other, 4)
    worker.release(other)
    worker.spill_all()
    live = worker.start([*span(1, 8), 9], chunk=2)
    worker.fetch_all(live)
    assert live.grant.usable_tokens >= 6
    worker.prefill(live, 2)


def test_a_fetch_policy_that_declines_says_what_the_tier_has() -> None:
    world = stage(fetch=FetchPolicy.AUTO)
    first, second = join(world, full(16)), join(world, full(16), name="w1")
    first.run(span(1, 8))
    spill(first)
    (match,) = world.manager.match(NS, pack(span(1, 10)), second.id)
    assert (match.match.usable_tokens, match.match.host_tokens) == (0, 8)


@pytest.mark.parametrize("was_here", [False, True])
def test_explain_calls_what_is_left_beyond_the_tiers_pages_a_page_tail(was_here: bool) -> None:
    """Whether or not the device itself ever had the pages that the tier can bring."""
    worker = warm(stage(), full(16))
    if not was_here:
        worker = join(worker.world, full(16), name="w1")
    (told,) = explain_at_once(worker.world.manager, NS, pack(span(1, 9)), worker.id)
    assert [(segment.residence, segment.num_tokens) for segment in told.segments] == [
        (Residence.HOST, 8),
        (Residence.MISSING, 1),
    ]
    assert told.match.miss_reason == (MissReason.EVICTED if was_here else MissReason.NEVER_SEEN)
    assert (told.segments[1].miss_reason, told.segments[1].gone) == (MissReason.PAGE_TAIL, None)
    assert told.notes == ("Only whole pages are reused, and the last token is always computed.",)
    (beyond,) = explain_at_once(worker.world.manager, NS, pack(span(1, 12)), worker.id)
    assert beyond.segments[1].miss_reason != MissReason.PAGE_TAIL


def test_targets_and_keys_are_parallel() -> None:
    worker = warm(stage(), full(6), window(6, 4))
    live = worker.start(span(1, 10))
    assert live.fetch is not None
    for part in live.fetch.groups:
        assert len(ids(part.page_ids)) == len(keys(part)) == live.fetch.num_pages
        assert part.page_hashes == live.fetch.groups[0].page_hashes
