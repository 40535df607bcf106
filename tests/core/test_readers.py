"""A failed fetch pauses the worker alone; all are paused when most readers of the store have failed."""

from __future__ import annotations

from typing import Any

from cache_service.core.attachments.messages import LeaseEnd
from cache_service.core.host.breaker import Breaker
from cache_service.core.host.readers import Readers
from session.words import HostTierKind, MissReason, WorkerId
from tests.core.at_once import to_the_end
from tests.core.attached import Stage, path
from tests.core.driver import FakeWorker
from tests.core.host_stage import churn, join, spill, stage
from tests.core.test_cases_pages import span
from tests.core.world import ABORTED, FAILED, NS, World, full, pack

PAUSE_MS = 1_000
ASKED = span(1, 10)
PATH = path(range(5))


def three(breaker_failures: int = 2, **config: Any) -> tuple[World, list[FakeWorker]]:
    """Three workers of one store, which holds a prompt of four pages that no device has."""
    world = stage(breaker_failures=breaker_failures, breaker_ms=PAUSE_MS, **config)
    workers = [join(world, full(12), name=f"w{number}") for number in range(3)]
    workers[0].run(span(1, 8))
    spill(workers[0])
    churn(workers[0])
    return world, workers


def fail(worker: FakeWorker) -> None:
    """A request whose fetch fails, and which is given up then."""
    live = worker.start(ASKED)
    assert live.fetch is not None
    worker.do_fetch(live, 0, FAILED)
    assert live.fetch is None, "it is computed"
    worker.release(live, ABORTED)


def fetches(worker: FakeWorker) -> None:
    """A request that fetches everything; nothing of it stays on the device."""
    live = worker.start(ASKED)
    assert live.fetch is not None, live.grant.match
    worker.fetch_all(live)
    assert live.grant.fetched_tokens == 8
    worker.release(live, ABORTED)
    churn(worker)


def paused(world: World) -> list[str]:
    return [worker.worker_id for worker in world.manager.stats().workers if worker.fetches_paused]


def is_store_open(world: World) -> bool:
    return world.manager.stats().host_tier.breaker_open


def notes(world: World, worker: FakeWorker) -> str:
    (told,) = to_the_end(world.manager.explaining(NS, pack(ASKED), WorkerId(worker.id), world.now_ms))
    return " ".join(told.notes)


def test_a_worker_that_fails_stops_alone() -> None:
    world, (first, second, third) = three()
    fail(first)
    assert not paused(world)
    fail(first)
    assert paused(world) == ["w0"] and not is_store_open(world)
    live = first.start(ASKED)
    assert live.fetch is None
    assert (live.grant.match.host_tokens, live.grant.match.miss_reason) == (8, MissReason.BREAKER_OPEN)
    first.release(live, ABORTED)
    fetches(second)
    fetches(third)
    assert paused(world) == ["w0"], "the success of others says nothing of its own way"
    assert world.manager.stats().workers[0].declined_tokens == 8


def test_match_says_whose_fetches_are_paused() -> None:
    world, (first, *_) = three(1)
    fail(first)
    found = {one.worker_id: one.match.miss_reason for one in world.manager.match(NS, pack(ASKED))}
    assert [name for name, why in found.items() if why is MissReason.BREAKER_OPEN] == ["w0"]


def test_explain_says_whose_fetches_are_paused_why_and_for_how_long() -> None:
    world, (first, second, third) = three()
    fail(first)
    fail(first)
    world.tick(400)
    assert "Fetches of w0 are paused for 0.6 s: its last 2 failed." in notes(world, first)
    assert "The host tier has 8 more tokens, and is not asked for them." in notes(world, first)
    assert "paused" not in notes(world, second)
    world.tick(600)
    assert "Fetches of w0 failed; one at a time is tried until one is answered." in notes(world, first)
    for worker in (second, third):
        fail(worker)
        fail(worker)
    assert "Fetches of all workers are paused for 1.0 s: the store fails." in notes(world, first)


def test_when_most_of_them_fail_the_store_does() -> None:
    world, (first, second, third) = three(1)
    fail(first)
    assert not is_store_open(world)
    fail(second)
    assert is_store_open(world) and paused(world) == ["w0", "w1"]
    live = third.start(ASKED)
    assert live.fetch is None and live.grant.match.miss_reason is MissReason.BREAKER_OPEN
    third.release(live, ABORTED)


def test_each_worker_comes_back_by_a_trial_of_its_own() -> None:
    world, (first, second, _) = three(1)
    fail(first)
    fail(second)
    world.tick(PAUSE_MS)
    assert not is_store_open(world) and not paused(world)
    trial = first.start(ASKED)
    assert len(trial.fetches) == 1
    other = first.start(ASKED)
    assert other.fetch is None and other.grant.match.miss_reason is MissReason.BREAKER_OPEN, "one ticket tries"
    first.release(other, ABORTED)
    first.do_fetch(trial, 0, FAILED)
    first.release(trial, ABORTED)
    assert paused(world) == ["w0"] and not is_store_open(world), "one failure is enough, and is its own"
    fetches(second)
    world.tick(PAUSE_MS)
    fetches(first)
    world.tick()
    assert not paused(world) and "failed" not in notes(world, first)


def test_a_trial_is_one_ticket_and_the_rest_follows_it() -> None:
    world, (first, *_) = three(1, transfer_pages=1)
    live = first.start(ASKED)
    assert len(live.fetches) == 4
    while live.fetches:
        first.do_fetch(live, 0, FAILED)
    first.release(live, ABORTED)
    world.tick(PAUSE_MS)
    live = first.start(ASKED)
    assert len(live.fetches) == 1
    first.do_fetch(live)
    assert len(live.fetches) == 3, "the store has answered"
    first.fetch_all(live)
    assert live.grant.usable_tokens == 8


def test_one_worker_alone_speaks_for_the_store() -> None:
    for tier in (HostTierKind.SHARED, HostTierKind.PRIVATE):
        world = stage(breaker_failures=1)
        worker = FakeWorker(world, [full(12)], 2, host_tier=tier, host_tier_id="redis" * (tier == HostTierKind.SHARED))
        worker.run(span(1, 8))
        spill(worker)
        churn(worker)
        fail(worker)
        assert is_store_open(world)


def test_who_is_away_or_has_another_store_counts_for_nothing() -> None:
    world, (first, second, third) = three(1)
    fail(first)
    third.disconnect()
    assert not is_store_open(world)
    fail(second)
    assert is_store_open(world), "two of the two that are here"
    world, (first, second, third) = three(1, max_spill_ms=2_000)
    late = third.start(ASKED)
    assert late.fetch is not None
    third.disconnect()
    third.host_tier_id = "other"
    third.hello()
    world.tick(2_000)
    assert not paused(world) and not is_store_open(world), "late, and of a store that it has left"
    third.do_fetch(late, 0, FAILED)
    assert not paused(world)


def test_a_silent_fetch_stops_its_worker_alone() -> None:
    world, (first, second, _) = three(1, max_spill_ms=2_000)
    first.start(ASKED)
    world.tick(2_000)
    assert paused(world) == ["w0"] and not is_store_open(world)
    fetches(second)


def test_a_stream_that_ends_forgets_no_failure_and_another_process_has_none() -> None:
    world, (first, *_) = three(1)
    fail(first)
    first.disconnect()
    first.hello()
    assert paused(world) == ["w0"]
    first.disconnect()
    world.tick(PAUSE_MS)
    first.hello()
    fetches(first)
    fail(first)
    first.restart("another")
    assert not paused(world)


def test_an_attached_engine_that_fails_stops_alone() -> None:
    stage = Stage(breaker_failures=1)
    engines = [stage.engine() for _ in range(3)]
    engines[0].save(PATH, 0, 5)
    engines[0].release(LeaseEnd(engines[0].lookup(PATH).lease, FAILED, 0))
    assert engines[0].lookup(PATH).breaker_open
    assert engines[1].lookup(PATH).usable_pages == 5 and not stage.manager.stats().host_tier.breaker_open
    engines[1].release(LeaseEnd(engines[1].lookup(PATH).lease, FAILED, 0))
    assert engines[2].lookup(PATH).breaker_open and stage.manager.stats().host_tier.breaker_open


def test_an_answer_to_one_closes_its_own_breaker_and_the_stores() -> None:
    readers = Readers(Breaker(1, PAUSE_MS))
    for name in ("a", "b"):
        readers.join(WorkerId(name), Breaker(1, PAUSE_MS))
        readers.failed(WorkerId(name), 0)
    assert readers.store.is_open
    readers.succeeded(WorkerId("a"))
    assert not readers.is_paused(WorkerId("a")) and readers.is_paused(WorkerId("b"))
    readers.leave(WorkerId("b"))
    readers.failed(WorkerId("b"), 0)
    assert not readers.is_paused(WorkerId("b")) and readers.breakers.keys() == {"a"}
