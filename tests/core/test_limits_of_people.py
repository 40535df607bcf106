"""What people and slow workers may make the manager keep: pins, queued spills, old tickets, tokens of leases."""

from __future__ import annotations

import pytest

from session.errors import TooMany
from session.messages import Ack, Refusal
from session.words import RefusalReason
from tests.core.driver import FakeWorker
from tests.core.host_stage import churn, join, stage
from tests.core.test_cases_pages import span, spare
from tests.core.world import DONE, NS, World, full, pack, window

HOUR = 3_600_000


def pinned(world: World) -> int:
    return world.manager.stats().workers[0].pinned_tokens


def test_pins_of_evicted_prefixes_are_forgotten() -> None:
    world = World(max_pinned_share=1.0, ghost_factor=0)
    worker = FakeWorker(world, [full(8), window(8, 4)], 2)
    cache = world.manager.worker(worker.id)
    for first in range(100, 3000, 100):
        worker.run(span(first, first + 8))
        assert world.manager.pin(NS, pack(span(first, first + 7)), HOUR, world.now_ms) == 8
        world.settle()
    assert len(cache.soft_pins) <= 2 and pinned(world) <= 16
    churn(worker)
    assert len(cache.soft_pins) == pinned(world) == 0


def test_a_pin_ends_in_time_for_each_part_of_what_was_split() -> None:
    world = World()
    worker = FakeWorker(world, [full(20)], 2)
    worker.run(span(1, 9))
    assert world.manager.pin(NS, pack(span(1, 8)), 500, world.now_ms) == 8
    worker.run([*span(1, 4), 60, 61, 62])
    assert pinned(world) == 8
    world.tick(499)
    assert pinned(world) == 8
    world.tick(1)
    assert pinned(world) == 0


def test_no_more_than_a_share_of_a_worker_is_pinned() -> None:
    world = World(max_pinned_share=0.5)
    worker = FakeWorker(world, [full(8)], 2)
    worker.run(span(1, 7))
    worker.run(span(50, 53))
    assert world.manager.pin(NS, pack(span(1, 6)), HOUR, world.now_ms) == 6
    assert world.manager.pin(NS, pack(span(1, 6)), HOUR, world.now_ms) == 6, "pinned again: no more than before"
    error = world.unchanged(world.manager.pin, NS, pack(span(50, 53)), HOUR, world.now_ms)
    assert isinstance(error, TooMany) and error.field == "tokens"
    assert world.manager.pin(NS, pack(span(1, 6)), 0, world.now_ms) == 6
    assert world.manager.pin(NS, pack(span(50, 53)), HOUR, world.now_ms) == 4


def test_a_worker_that_acknowledges_nothing_keeps_no_queue_of_what_is_gone() -> None:
    world = stage(watch=False, max_open_tickets=2, ghost_factor=0)
    worker = join(world, full(16))
    cache = world.manager.worker(worker.id)
    for first in range(100, 9000, 100):
        worker.run(span(first, first + 3))
    assert len(cache.transfers.spills) == 2
    assert len(cache.spill_queue) <= cache.tree.num_nodes <= 16


def test_a_spill_without_an_ack_is_given_up_and_its_late_copy_is_nobodys() -> None:
    world = stage(max_spill_ms=1000)
    worker = join(world, full(4))
    worker.run(span(1, 8))
    world.tick()
    ((order, written_late),) = worker.spills
    worker.spills.clear()
    worker.refused(span(50, 57))
    world.tick(1000)
    assert spare(worker) == 4
    worker.prefill(other := worker.start(span(50, 57)))
    worker.release(other)
    worker.spill_all()
    worker.run(span(1, 8))
    world.tick()
    assert not worker.spills, "the pages under the old ticket are on their way until it is closed"
    assert world.manager.stats().host_tier.num_rows == 4
    worker.store.update(written_late)
    worker.step(acks=[Ack(order.ticket, order.num_pages, DONE)])
    assert world.manager.stats().host_tier.num_rows == 4, "nobody knows what the late copy holds"
    assert not worker.store.keys() & written_late.keys(), "a scan after a restart would make them findable"
    world.tick()
    worker.spill_all()
    assert world.manager.stats().host_tier.num_rows == 8, "it is copied anew"


@pytest.mark.parametrize("how", ["hello", "death"])
def test_what_was_given_up_ends_with_the_stream(how: str) -> None:
    world = stage(max_spill_ms=1000)
    worker = join(world, full(4))
    worker.run(span(1, 8))
    world.tick()
    worker.spills.clear()
    world.tick(1000)
    if how == "hello":
        worker.disconnect()
        worker.hello()
    else:
        worker.restart("i1")
    world.tick()
    worker.spill_all()
    worker.run([*span(1, 7), 9])
    world.tick()
    worker.spill_all()
    assert world.manager.stats().host_tier.num_rows >= 4


def test_tokens_of_leases_are_bounded_unless_a_sequence_is_alone() -> None:
    world = World(max_lease_bytes=64)
    worker = FakeWorker(world, [full(64)], 2)
    first = worker.start(span(1, 20))
    refusal = worker.refused(span(30, 33))
    assert refusal.reason is RefusalReason.NO_ROOM and "bytes of tokens" in refusal.detail
    worker.release(first)
    second = worker.start(span(1, 8))
    worker.start(span(30, 33))
    worker.prefill(second)
    worker.decode(second, span(60, 64))
    worker.refused(span(40, 43))
    worker.release(second)
    worker.start(span(40, 43))


def test_tokens_of_all_workers_leases_are_bounded_together() -> None:
    """However many worker ids a client invents."""
    world = World(max_total_lease_bytes=160)
    workers = [FakeWorker(world, [full(64)], 2, f"w{number}") for number in range(5)]
    lives = [worker.start(span(1 + 20 * number, 10 + 20 * number)) for number, worker in enumerate(workers[:4])]
    refusal = workers[4].refused(span(200, 201))
    assert refusal.reason is RefusalReason.NO_ROOM
    assert refusal.detail == "live sequences of all workers together may hold 160 bytes of tokens"
    assert workers[0].refused(span(200, 201)).reason is RefusalReason.NO_ROOM
    workers[1].release(lives[1])
    workers[4].start(span(200, 209))
    world.manager.goodbye(workers[0].id)
    workers[2].start(span(300, 309))
    workers[3].restart("i1")
    workers[3].start(span(300, 309))
    assert world.manager.lease_bytes.num_bytes == 160


def test_the_longest_prompt_is_admitted_where_nobody_holds_any() -> None:
    world = World(max_total_lease_bytes=40)
    workers = [FakeWorker(world, [full(64)], 2, f"w{number}") for number in range(2)]
    live = workers[0].start(span(1, 20))
    workers[1].refused(span(1, 2))
    workers[0].release(live)
    workers[1].start(span(1, 20))


def test_running_sequences_grow_to_twice_the_limit() -> None:
    world = World(max_total_lease_bytes=64)
    worker = FakeWorker(world, [full(64)], 2)
    live = worker.start(span(1, 16))
    worker.prefill(live)
    worker.decode(live, span(60, 75))
    live.append([76])
    error = world.unchanged(world.manager.publish, worker.id, worker.publish_of(live))
    assert isinstance(error, TooMany) and error.field == "tokens"
    assert "may grow to 128 bytes of tokens" in error.reason
    live.tokens.pop()
    worker.release(live)


def test_adopts_beyond_twice_the_limit_are_queued_again() -> None:
    world = World(max_total_lease_bytes=64)
    workers = [FakeWorker(world, [full(64)], 2, f"w{number}") for number in range(2)]
    lives = [worker.start(span(1, 8)) for worker in workers]
    for worker, live in zip(workers, lives, strict=True):
        worker.prefill(live)
        worker.decode(live, span(60, 67))
    live = workers[0].live[lives[0].id]
    live.append([68, 69])
    world.new_manager()
    for worker in workers:
        worker.connected = False
    answers = []
    for worker, live in zip(workers, lives, strict=True):
        worker.hello()
        answers.append(worker.adopt(live))
    assert not isinstance(answers[0], Refusal)
    assert isinstance(answers[1], Refusal) and answers[1].reason is RefusalReason.NO_ROOM
    assert "together may hold 128 bytes" in answers[1].detail
    assert world.manager.lease_bytes.num_bytes == 18 * 4


def test_workers_that_hold_nothing_may_have_lost_it() -> None:
    """Match answers for each worker why it misses, though it looks alike on most of them."""
    world = World()
    workers = [FakeWorker(world, [full(8)], 2, f"w{number}") for number in range(4)]
    workers[2].run(span(1, 8))
    churn(workers[2])
    found = world.manager.match(NS, pack(span(1, 9)))
    assert [match.match.miss_reason.name for match in found] == ["NEVER_SEEN", "NEVER_SEEN", "EVICTED", "NEVER_SEEN"]
