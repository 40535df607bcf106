"""Attached engines and workers in one store: they share its quota and never a page, and what each holds stays."""

from __future__ import annotations

from random import Random

import pytest

from cache_service.core.attachments.messages import (
    Attach,
    AttachmentId,
    Commit,
    Found,
    GroupRange,
    LeaseEnd,
    Lookup,
    Path,
    Reserve,
    WrittenPages,
)
from session.words import GroupKind, GroupSpec
from tests.core.attached import DONE, path, token_path
from tests.core.driver import FakeWorker
from tests.core.host_stage import churn, join, spill, stage
from tests.core.test_cases_pages import span
from tests.core.world import FINGERPRINT, World, full

PAGE_BYTES, PAGE_TOKENS = 64, 2
GROUP = GroupSpec("full", GroupKind.FULL, 2**31 - 1, PAGE_BYTES)


class Beside:
    """One attached engine in a world of workers; its values are in the world's stores as any."""

    def __init__(self, world: World) -> None:
        self.world, self.attachments = world, world.manager.attachments
        attach = Attach("engine", FINGERPRINT, "model", PAGE_TOKENS, (GROUP,), 1, "redis")
        attached = self.attachments.attach(attach, world.now_ms)
        self.id = AttachmentId(attached.epoch, attached.attachment)
        self.written: set[bytes] = set()

    def save(self, asked: Path, num_pages: int) -> int:
        attachment = self.attachments.find(self.id, "reserve", self.world.now_ms)
        reserve = Reserve(asked, (GroupRange(0, 0, num_pages),))
        reserved = self.attachments.reserve(attachment, reserve, self.world.now_ms)
        self.world.settle()
        if not reserved.ticket:
            return 0
        count = len(reserved.pages[0].pages)
        commit = Commit(reserved.ticket, 0, DONE, (WrittenPages(0, count, count * PAGE_BYTES),))
        committed = self.attachments.commit(attachment, commit, self.world.now_ms)
        self.world.settle()
        return committed.num_findable

    def lookup(self, asked: Path) -> Found:
        attachment = self.attachments.find(self.id, "lookup", self.world.now_ms)
        found = self.attachments.lookup(attachment, Lookup(asked), self.world.now_ms)
        self.world.settle()
        return found

    def release(self, lease: int) -> None:
        attachment = self.attachments.find(self.id, "release", self.world.now_ms)
        self.attachments.release(attachment, [LeaseEnd(lease, DONE)], self.world.now_ms)
        self.world.settle()


def tokens(*numbers: int) -> Path:
    return token_path(numbers)


def test_the_same_tokens_of_a_worker_are_no_hit_of_an_engine() -> None:
    world = stage()
    worker = join(world, full(8))
    worker.run(span(1, 8))
    spill(worker)
    engine = Beside(world)
    assert engine.lookup(tokens(*span(1, 9))).usable_pages == 0
    assert engine.save(tokens(*span(20, 27)), 4) == 4
    churn(worker)
    live = worker.start([*span(20, 27), 1])
    assert live.fetch is None, "an engine's rows are no hit of a worker"


def test_both_live_under_one_quota() -> None:
    world = stage(host_quota_bytes=6 * PAGE_BYTES)
    worker, engine = join(world, full(32)), Beside(world)
    assert engine.save(path("abcd"), 4) == 4
    worker.run(span(1, 8))
    spill(worker)
    stats = world.manager.stats().host_tier
    assert (stats.num_rows, stats.num_bytes) == (6, 6 * PAGE_BYTES)
    assert engine.lookup(path("abcd")).usable_pages == 2, "tails went first"


def test_a_spill_makes_no_room_among_held_rows() -> None:
    world = stage(host_quota_bytes=4 * PAGE_BYTES)
    worker, engine = join(world, full(32)), Beside(world)
    engine.save(path("abcd"), 4)
    lease = engine.lookup(path("abcd")).lease
    worker.run(span(1, 8))
    spill(worker)
    assert engine.lookup(path("abcd")).usable_pages == 4
    assert world.manager.stats().host_tier.num_bytes == 4 * PAGE_BYTES
    engine.release(lease)


@pytest.mark.parametrize("seed", range(12))
def test_random_work_of_both(seed: int) -> None:
    """The audit comes after each call; at the end nothing is held."""
    dice = Random(seed)
    world = stage(host_quota_bytes=dice.choice([8, 20]) * PAGE_BYTES, host_lease_ms=200)
    workers: list[FakeWorker] = [join(world, full(16), name=f"w{number}") for number in range(2)]
    engine, leases, hits = Beside(world), list[int](), 0
    for _ in range(120):
        names = [dice.choice("ab") for _ in range(dice.randrange(1, 7))]
        act = dice.randrange(6)
        if act == 0:
            engine.save(path(names), len(names))
        elif act == 1 and len(leases) < 5:
            found = engine.lookup(path(names))
            hits += found.usable_pages
            leases += [found.lease] if found.lease else []
        elif act == 2 and leases:
            engine.release(leases.pop(dice.randrange(len(leases))))
        elif act == 3:
            worker = dice.choice(workers)
            spill(worker)
            worker.run([ord(name) for name in names for _ in range(PAGE_TOKENS)] + [1])
            spill(worker)
        elif act == 4:
            world.tick(dice.choice([1, 50]))
        else:
            worker = dice.choice(workers)
            spill(worker)  # open spills hold pages
            churn(worker)
    assert hits and world.manager.stats().host_tier.num_spilled_pages
    world.tick(1_000)
    index = world.manager.tiers.shared["redis"]
    assert (index.quota.num_held, index.quota.held_bytes, index.quota.reserved_bytes) == (0, 0, 0)
