"""When the automatic policy brings pages from the host tier, by measured rates, and where it says that it does not."""

from __future__ import annotations

import pytest

from cache_service.core.base.fetch_estimate import DOUBLING_MS
from cache_service.core.base.types import FetchPolicy
from session.messages import Rates
from session.words import MissReason
from tests.core.at_once import explain_at_once
from tests.core.driver import FakeWorker
from tests.core.host_stage import join, spill, stage, warm
from tests.core.test_cases_pages import span
from tests.core.world import ABORTED, NS, Live, World, full, pack, state

PAGE_BYTES = 64
SNAPSHOT_BYTES = 10_000
# Eight tokens in four pages are in the host tier: at this rate they are computed in a second.
PREFILL = 8.0
PROMPT = span(1, 10)


def auto(**config: int) -> World:
    return stage(fetch=FetchPolicy.AUTO, **config)


def asked(worker: FakeWorker, rates: Rates) -> Live:
    worker.rates = rates
    return worker.start(PROMPT)


def told(world: World, worker: FakeWorker) -> tuple[MissReason, str]:
    """What Explain says of the prompt: the reason, and its last note."""
    (explained,) = explain_at_once(world.manager, NS, pack(PROMPT), worker.id)
    return explained.match.miss_reason, explained.notes[-1]


@pytest.mark.parametrize(("bytes_per_s", "pays"), [(255, False), (256, False), (257, True), (1e12, True)])
def test_a_fetch_pays_where_its_bytes_take_less_time_than_its_tokens(bytes_per_s: float, pays: bool) -> None:
    world = auto()
    worker = warm(world, full(6))
    live = asked(worker, Rates(PREFILL, bytes_per_s))
    assert (live.fetch is not None) is pays
    match = live.grant.match
    assert (match.usable_tokens, match.host_tokens) == (0, 8)
    assert (match.miss_reason is MissReason.FETCH_SLOWER) is not pays
    worker.fetch_all(live)
    worker.prefill(live)
    (stats,) = world.manager.stats().workers
    assert (stats.fetched_tokens, stats.declined_tokens) == ((8, 0) if pays else (0, 8))
    assert stats.rates == Rates(PREFILL, bytes_per_s)
    assert dict(stats.misses).get(MissReason.FETCH_SLOWER, 0) == (not pays)


def test_explain_says_what_a_fetch_would_take() -> None:
    world = auto()
    worker = warm(world, full(6))
    worker.rates = Rates(PREFILL, 128.0)
    worker.step()
    reason, note = told(world, worker)
    assert reason is MissReason.FETCH_SLOWER
    assert note.startswith("The host tier has 8 more tokens, which are computed and not fetched")
    assert "take 2.000 s, and computing them takes 1.000 s" in note
    worker.rates = Rates(PREFILL, 1e9)
    worker.step()
    assert told(world, worker)[0] is not MissReason.FETCH_SLOWER


def test_a_snapshot_counts_with_all_its_bytes() -> None:
    """Four pages alone would pay at this rate; the snapshot behind them takes ten times as long as the tokens."""
    large = state(6)._replace(page_bytes=SNAPSHOT_BYTES)
    rates = Rates(PREFILL, SNAPSHOT_BYTES / 10)
    for groups, pays in (((full(6),), True), ((full(6), large), False)):
        live = asked(warm(auto(), *groups), rates)
        assert (live.fetch is not None) is pays
    moved = 4 * PAGE_BYTES + SNAPSHOT_BYTES
    for bytes_per_s, pays in ((moved, False), (moved + 1, True)):
        live = asked(warm(auto(), full(6), large), Rates(PREFILL, bytes_per_s))
        assert (live.fetch is not None) is pays
        assert (live.grant.match.miss_reason is MissReason.FETCH_SLOWER) is not pays


def test_pages_that_are_on_the_device_cost_nothing() -> None:
    """Of eight tokens the device has four, and computes the other four in half a second."""
    for bytes_per_s, pays in ((4 * PAGE_BYTES, False), (4 * PAGE_BYTES + 1, True)):
        world = auto()
        worker = warm(world, full(6))
        worker.rates = Rates(PREFILL, 1.0)
        worker.run([*span(1, 4), 99])
        live = asked(worker, Rates(PREFILL, bytes_per_s))
        assert live.grant.match.usable_tokens == 4
        assert (live.fetch is not None) is pays


def test_before_the_first_fetch_spills_tell_how_fast_the_store_is() -> None:
    assert asked(warm(auto(), full(6)), Rates(PREFILL, 0.0, 1e9)).fetch is not None
    assert asked(warm(auto(), full(6)), Rates(PREFILL, 0.0, 1.0)).fetch is None
    assert asked(warm(auto(), full(6)), Rates(PREFILL, 1e9, 1.0)).fetch is not None, "a fetch's own rate comes first"
    assert asked(warm(auto(), full(6)), Rates(0.0, 1.0, 1.0)).fetch is not None, "unknown: granted"


def test_a_slow_moment_of_the_store_is_not_remembered_for_ever() -> None:
    """What is not fetched is not measured: each minute without a fetch doubles the rate that was measured last."""
    world = auto()
    worker = warm(world, full(6))
    rates = Rates(PREFILL, 65.0)
    for minutes in range(3):
        live = asked(worker, rates)
        assert (live.fetch is None) is (minutes < 2)
        worker.release(live, ABORTED)
        world.tick(DOUBLING_MS)
    (ticket,) = worker.orphans
    worker.ack_orphan(ticket)
    assert asked(worker, rates).fetch is None, "it was fetched since, and is as slow as ever"


def test_when_all_fetches_are_taken_that_is_the_reason() -> None:
    world = auto(max_open_tickets=1)
    worker = warm(world, full(12))
    first = worker.start(PROMPT)
    assert first.fetch is not None
    second = worker.start(PROMPT)
    assert second.fetch is None and second.grant.match.miss_reason is MissReason.FETCH_BUSY
    reason, note = told(world, worker)
    assert reason is MissReason.FETCH_BUSY and "as many fetches as may be" in note


def test_always_fetches_at_any_rate() -> None:
    worker = warm(stage(fetch=FetchPolicy.ALWAYS), full(6))
    assert asked(worker, Rates(1e9, 1.0)).fetch is not None


def test_a_match_of_many_workers_says_it_of_each() -> None:
    """Neither holds anything of the prompt, so they share what was found; not what they would do with it."""
    world = auto()
    writer, slow, quick = (join(world, full(8), name=f"w{at}") for at in range(3))
    writer.run(span(1, 8))
    spill(writer)
    slow.rates, quick.rates = Rates(PREFILL, 1.0), Rates(PREFILL, 1e9)
    for worker in (slow, quick):
        worker.step()
    told = {found.worker_id: found.match for found in world.manager.match(NS, pack(PROMPT))}
    assert [told[worker.id].host_tokens for worker in (slow, quick)] == [8, 8]
    assert told[slow.id].miss_reason is MissReason.FETCH_SLOWER
    assert told[quick.id].miss_reason is not MissReason.FETCH_SLOWER


def test_another_worker_weighs_its_own_rates() -> None:
    world = auto()
    slow, quick = join(world, full(8)), join(world, full(8), name="w1")
    slow.rates = Rates(PREFILL, 1.0)
    slow.run(span(1, 8))
    spill(slow)
    assert asked(quick, Rates(PREFILL, 1e9)).fetch is not None
