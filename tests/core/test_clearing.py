"""Clear and Explain in slices: steps come in between, and nothing old is found once the first slice has run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cache_service.core.base.errors import LeasesInScope
from cache_service.core.base.types import Cleared, Removed, Stored
from cache_service.core.verbs import clearing, explaining
from session.words import Namespace
from tests.core.at_once import clear_at_once, to_the_end
from tests.core.driver import FakeWorker
from tests.core.host_stage import churn, join, spill, stage
from tests.core.test_cases_pages import span, spare
from tests.core.world import NS, Live, World, full, pack, state, window

OTHER = Namespace("model", "", "other")


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: Any) -> None:
    monkeypatch.setattr(clearing, "SLICE", 1)
    monkeypatch.setattr(explaining, "ROOTS_IN_A_SLICE", 1)


def filled(**config: Any) -> FakeWorker:
    worker = join(stage(**config), full(40))
    for first in range(0, 50, 10):
        worker.run(span(first, first + 8))
    while worker.world.tick() or worker.spills:
        worker.spill_all()
    return worker


@pytest.mark.parametrize("namespace", [None, NS])
def test_nothing_old_is_found_after_the_first_slice(namespace: Namespace | None) -> None:
    worker = filled()
    world = worker.world
    slices = world.manager.clearing(namespace, False)
    next(slices)
    world.settle()
    for first in range(0, 50, 10):
        assert world.tokens_cached(span(first, first + 9)) == 0
        (match,) = world.manager.match(NS, pack(span(first, first + 9)))
        assert match.match.host_tokens == 0
    live = worker.start(span(0, 9))
    assert live.grant.usable_tokens == 0 and not live.fetches
    worker.prefill(live)
    cleared = to_the_end(slices)
    world.settle()
    assert cleared.num_pages == 20 and cleared.num_host_rows == 20
    assert world.tokens_cached([*span(0, 9), 0]) == 10, "what was published since stays"
    worker.release(live)
    spill(worker)
    churn(worker)
    again = worker.start([*span(0, 9), 0])
    assert again.fetches, "and it is spilled and fetched as ever"
    worker.fetch_all(again)
    worker.prefill(again)


def test_a_dry_run_counts_and_changes_nothing() -> None:
    worker = filled()
    world = worker.world
    world.manager.pin(NS, pack(span(0, 3)), 1000, world.now_ms)
    before = world.snapshot()
    counted = to_the_end(world.manager.clearing(NS, False, dry_run=True))
    assert world.snapshot() == before
    assert (counted.num_pages, counted.num_host_rows, counted.num_pinned_pages) == (20, 20, 2)
    assert to_the_end(world.manager.clearing(NS, False)) == counted
    assert spare(worker) == 40


def test_a_dry_run_fails_where_the_call_would() -> None:
    worker = filled()
    worker.start(span(0, 9))
    for dry_run in (True, False):
        with pytest.raises(LeasesInScope):
            next(worker.world.manager.clearing(None, False, dry_run))


def test_watchers_hear_in_the_order_of_what_can_be_found() -> None:
    worker = filled()
    world = worker.world
    findable: set[bytes] = set()

    def hear() -> None:
        for event in world.events:
            if isinstance(event, Stored):
                findable.update(event.page_hashes)
            elif isinstance(event, Removed):
                findable.difference_update(event.page_hashes)
            else:
                findable.clear()
        world.events.clear()

    hear()
    for namespace in (NS, None):
        slices = world.manager.clearing(namespace, False)
        next(slices)
        worker.run(span(20, 28))
        to_the_end(slices)
        world.settle()
        told = list(world.events)
        hear()
        assert len(findable) == 4, "the prompt that was published in between"
        assert sum(isinstance(event, Cleared) for event in told) == (namespace is None)
        worker.spill_all()


def test_rows_of_unknown_namespace_stay_for_the_others() -> None:
    worker = filled()
    world = worker.world
    worker.run(span(1, 8), namespace=OTHER)
    spill(worker)
    keys = tuple(worker.store)
    world.new_manager()
    worker.restart("i1")
    world.manager.tiers.add_scanned("redis", b"f" * 32, keys)
    cleared = clear_at_once(world.manager, NS, False)
    assert cleared.num_host_rows == 0
    assert not worker.start(span(0, 8)).fetches
    live = worker.start(span(1, 9), OTHER)
    assert live.fetches
    worker.fetch_all(live)
    worker.prefill(live)
    worker.run(span(10, 18))
    spill(worker)
    other = join(world, full(40), name="w1")
    assert other.start(span(10, 18)).fetches, "written anew"


@pytest.mark.parametrize("seed", range(6))
def test_steps_between_the_slices(seed: int) -> None:
    """Whatever comes in between, the books balance, each page read is right, and the rest goes free."""
    rng = random.Random(seed)
    world = stage(transfer_pages=2, max_pinned_share=1.0)
    groups = [(full(30),), (full(30), window(30, 6), state(9)), (window(20, 6), state(9))][seed % 3]
    worker = join(world, *groups)
    running: list[Live] = []
    for _ in range(6):
        unused = rng.random() < 0.5 or bool(worker.live or worker.spills or worker.orphans)
        slices = world.manager.clearing(rng.choice([None, NS, OTHER]), unused)
        finished = False
        while not finished:
            try:
                next(slices)
            except StopIteration:
                finished = True
            world.settle()
            tokens = [rng.randrange(2) for _ in range(rng.randrange(2, 14))]
            if len(running) < 2 and rng.random() < 0.7:
                live = worker.submit(tokens, rng.choice([NS, OTHER]), chunk=4)
                if isinstance(live, Live):
                    worker.fetch_all(live)
                    worker.prefill(live, 4)
                    running.append(live)
            elif running and rng.random() < 0.6:
                worker.release(running.pop(rng.randrange(len(running))))
            if rng.random() < 0.3:
                world.tick(20)
                worker.spill_all()
            if rng.random() < 0.2:
                world.manager.pin(NS, pack(tokens), rng.choice([0, 50]), world.now_ms)
    for live in running:
        worker.release(live)
    worker.spill_all()
    clear_at_once(world.manager, None, False)
    world.settle()
    assert all(spare(worker, group) == spec.num_pages for group, spec in enumerate(groups))


def test_explain_goes_on_while_namespaces_come_and_go() -> None:
    world = World()
    worker = FakeWorker(world, [full(60)], 2)
    for number in range(8):
        worker.run(span(1, 5), namespace=Namespace("model", "", f"salt{number}"))
    slices = world.manager.explaining(NS, pack(span(1, 6)), None, world.now_ms)
    next(slices)
    clear_at_once(world.manager, Namespace("model", "", "salt3"), True)
    worker.run(span(1, 5), namespace=Namespace("model", "", "salt9"))
    (explained,) = to_the_end(slices)
    assert explained.match.miss_reason.name == "OTHER_SALT"


def test_explain_tells_of_pins() -> None:
    world = World()
    worker = FakeWorker(world, [full(20)], 2)
    worker.run(span(1, 9))
    world.manager.pin(NS, pack(span(1, 4)), 700, world.now_ms)
    (explained,) = to_the_end(world.manager.explaining(NS, pack(span(1, 9)), None, world.now_ms + 200))
    assert (explained.pinned_tokens, explained.pin_left_ms) == (4, 500)
