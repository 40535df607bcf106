"""What nobody fetches, names or finishes costs a bounded memory: events, host tiers, half-seen rows, keys to delete."""

from __future__ import annotations

import pytest

from cache_service.core.base.types import Cleared
from cache_service.core.device.event_log import EventLog
from cache_service.core.host import key_queues, seen_ranks
from cache_service.core.host.breaker import Breaker
from cache_service.core.host.hash_index import HashIndex
from cache_service.core.host.host_key import HostKey, build_key
from cache_service.core.host.host_tiers import MAX_UNUSED_TIERS
from session.words import HostTierKind, MissReason, PageHash, WorkerId
from tests.core.at_once import clear_at_once
from tests.core.driver import FakeWorker
from tests.core.test_cases_pages import span
from tests.core.world import FINGERPRINT, NS, World, full


def cleared(number: int) -> Cleared:
    return Cleared(WorkerId(f"w{number}"))


def page(number: int) -> PageHash:
    return PageHash(number.to_bytes(32, "little"))


def make_index(ranks: int) -> HashIndex:
    index = HashIndex(10_000, Breaker(2, 1000), True)
    index.group_ranks[FINGERPRINT] = (ranks,)
    index.group_bytes[FINGERPRINT] = (10,)
    return index


def test_the_oldest_events_are_dropped_and_counted() -> None:
    log = EventLog(3)
    for number in range(5):
        log.record(cleared(number))
    assert log.take_num_lost() == 2 and log.take_num_lost() == 0
    assert log.take() == (cleared(2), cleared(3), cleared(4)) and log.take() == ()
    log.record(cleared(5))
    assert log.take_num_lost() == 0 and log.take() == (cleared(5),)


def test_one_verb_with_too_many_events_says_how_many_are_missing() -> None:
    world = World(watch=True, max_events=4)
    worker = FakeWorker(world, (full(40),), 4, "w0", "birth")
    for number in range(6):
        worker.run(span(9 * number + 1, 9 * number + 9))
    manager = world.manager
    assert manager.take_num_lost_events() == 0, "the stage takes them after each call"
    assert clear_at_once(manager, NS, True).num_pages == 12
    assert manager.take_num_lost_events() == 2 and len(manager.take_events()) == 4


def test_half_seen_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_ranks, "MAX_HALF_SEEN", 3)
    index = make_index(ranks=2)
    for number in range(5):
        assert not index.add_scanned(HostKey(FINGERPRINT, 0, 0, page(number)))
    added = [number for number in range(5) if index.add_scanned(HostKey(FINGERPRINT, 0, 1, page(number)))]
    assert added == [], "each look at a dropped row drops the next one"
    index.lose()
    for number in range(5):
        index.add_scanned(HostKey(FINGERPRINT, 0, 0, page(number)))
    added = [number for number in (4, 3, 2, 1) if index.add_scanned(HostKey(FINGERPRINT, 0, 1, page(number)))]
    assert added == [4, 3, 2]


def test_keys_to_delete_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_queues, "MAX_DELETES", 3)
    index = make_index(ranks=1)
    for number in range(5):
        index.add(FINGERPRINT, page(number), 1, NS)
    for number in range(5):
        assert index.forget(FINGERPRINT, page(number), MissReason.LOST)
    assert index.take_deletes(9) == [build_key(HostKey(FINGERPRINT, 0, 0, page(number))) for number in (2, 3, 4)]


@pytest.mark.parametrize("leaves", ["goodbye", "grace"])
def test_few_tiers_outlive_their_last_worker(leaves: str) -> None:
    world = World(grace_ms=10)
    workers = [
        FakeWorker(world, (full(8),), 4, f"w{i}", f"birth {i}", HostTierKind.SHARED, f"redis {i}")
        for i in range(MAX_UNUSED_TIERS + 3)
    ]
    workers[0].restart("born again")  # its tier was named last by now
    for worker in workers:
        if leaves == "goodbye":
            world.manager.goodbye(worker.id)
        else:
            worker.disconnect()
    world.manager.tick(world.now_ms + 10)
    assert not world.manager.workers
    kept = [tier_id for tier_id, _ in world.manager.tiers.named()]
    assert kept == [*(f"redis {i}" for i in range(4, MAX_UNUSED_TIERS + 3)), "redis 0"]
