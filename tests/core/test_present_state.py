"""A watcher that comes late: what is cached already, slice by slice, and what happens meanwhile, give the state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from cache_service.core.base.types import Cleared, Connection, Event, Removed, Stored
from cache_service.core.verbs import present_state
from session.words import HASH_BYTES, Namespace
from tests.core.at_once import clear_at_once
from tests.core.audit import nodes_of
from tests.core.driver import FakeWorker
from tests.core.test_cases_pages import span
from tests.core.world import ABORTED, NS, Live, World, full, window

PAGE = 2
OTHER = Namespace("model", "", "other")
Page = tuple[str, int, bytes]


class Watcher:
    """What the events say: which pages are findable, and which workers are connected."""

    def __init__(self) -> None:
        self.pages: set[Page] = set()
        self.connected: dict[str, bool] = {}
        self.tokens: dict[bytes, bytes] = {}

    def hear(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Stored):
                self.pages |= {(event.worker_id, event.group, page_hash) for page_hash in event.page_hashes}
                size = len(event.tokens) // len(event.page_hashes)
                for at, page_hash in enumerate(event.page_hashes):
                    tokens = event.tokens[at * size : (at + 1) * size]
                    assert self.tokens.setdefault(page_hash, tokens) == tokens
            elif isinstance(event, Removed):
                self.pages -= {(event.worker_id, event.group, page_hash) for page_hash in event.page_hashes}
            elif isinstance(event, Cleared):
                self.pages = {page for page in self.pages if event.worker_id not in (None, page[0])}
                self.connected.pop(event.worker_id or "", None)
            elif isinstance(event, Connection):
                self.connected[event.worker_id] = event.is_connected


def cached(world: World) -> set[Page]:
    pages: set[Page] = set()
    for worker_id, worker in world.manager.workers.items():
        cache = worker.cache
        for node in nodes_of(cache):
            if node.root in cache.tree.detached:
                continue
            cache.tree.ensure_hashes(node)
            packed = bytes(node.hashes)
            hashes = [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]
            assert len(hashes) == node.resident
            pages |= {(worker_id, group, page_hash) for group in cache.event_groups for page_hash in hashes}
    return pages


def told(world: World) -> tuple[Watcher, int]:
    """All slices at once."""
    watcher, slices = Watcher(), world.manager.present_state()
    while True:
        try:
            watcher.hear(next(slices))
        except StopIteration as end:
            return watcher, end.value


def test_it_tells_all_pages_and_all_workers() -> None:
    world = World(watch=False)
    workers = [FakeWorker(world, [full(40), full(60, "other")], PAGE, f"w{number}") for number in range(3)]
    workers[0].run(span(1, 9))
    workers[0].run([*span(1, 4), *span(50, 55)])
    workers[0].run(span(1, 9), namespace=OTHER)
    workers[1].run(span(1, 9))
    workers[2].disconnect()
    world.manager.watch(True)
    watcher, num_pages = told(world)
    assert watcher.pages == cached(world) and len(watcher.pages) == 2 * num_pages
    assert num_pages == 4 + 3 + 4 + 4
    assert watcher.connected == {"w0": True, "w1": True, "w2": False}


def test_a_long_run_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(present_state, "MAX_PAGES", 3)
    world = World(watch=True)
    worker = FakeWorker(world, [full(40)], PAGE)
    worker.run(span(1, 21))
    parts = [event for events in world.manager.present_state() for event in events if isinstance(event, Stored)]
    assert [len(part.page_hashes) for part in parts] == [3, 3, 3, 1]
    for before, after in pairwise(parts):
        assert after.parent_hash == before.page_hashes[-1]
    assert parts[0].parent_hash == b"" and told(world)[0].pages == cached(world)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_between_the_slices(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes split, grow, are evicted and cleared, workers come, go and die; over few tokens, in small pools."""
    draw = Random(seed)
    monkeypatch.setattr(present_state, "MAX_PAGES", draw.choice([1, 2, 1024]))
    world = World(watch=False, grace_ms=500)
    groups = [full(30)] if seed % 3 else [full(30), window(40, 4)]
    workers = [FakeWorker(world, groups, PAGE, f"w{number}") for number in range(3)]
    for _ in range(20):
        something(world, workers, draw)
    world.manager.watch(True)
    watcher = Watcher()
    world.listeners.append(watcher.hear)
    slices, num_slices = world.manager.present_state(), 0
    while (events := next(slices, None)) is not None:
        watcher.hear(events)
        num_slices += 1
        if draw.random() < 0.5:
            something(world, workers, draw)
    assert num_slices >= 3
    for _ in range(5):
        something(world, workers, draw)
        assert watcher.pages == cached(world)
        assert watcher.connected == {name: known.connected for name, known in world.manager.workers.items()}


def something(world: World, workers: list[FakeWorker], draw: Random) -> None:
    worker = draw.choice(workers)
    namespace = draw.choice([NS, OTHER])
    if not worker.connected:
        worker.hello() if draw.random() < 0.7 else world.tick(300)
        return
    chance = draw.random()
    if chance < 0.6:
        live = worker.submit([draw.randrange(1, 3) for _ in range(draw.randrange(3, 16))], namespace)
        if isinstance(live, Live):
            worker.prefill(live)
            if draw.random() < 0.5:
                worker.decode(live, [draw.randrange(1, 3) for _ in range(draw.randrange(5))])
            worker.release(live)
    elif chance < 0.7:
        clear_at_once(world.manager, draw.choice([namespace, None]), True)
        world.settle()
    elif chance < 0.8:
        for live in list(worker.live.values()):
            worker.release(live, ABORTED)
    elif chance < 0.9:
        worker.disconnect()
    elif chance < 0.95:
        worker.restart(f"i{draw.random()}")
    else:
        world.tick(100)
