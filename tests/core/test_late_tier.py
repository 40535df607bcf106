"""A worker whose host tier answers only after its first Hello, and hashes that are made when somebody needs them."""

from __future__ import annotations

from typing import Any

import pytest

from cache_service.core.base import page_hash
from cache_service.core.base.types import SpillPolicy, Stored
from cache_service.core.device.radix_node import Node
from session.words import HASH_BYTES, HostTierKind
from tests.core import audit
from tests.core.driver import FakeWorker
from tests.core.host_stage import churn, join, spill, stage
from tests.core.test_cases_pages import span
from tests.core.world import NS, World, full, pack


def say(worker: FakeWorker, kind: HostTierKind, tier_id: str = "") -> None:
    """Hello again, with another host tier."""
    worker.host_tier, worker.host_tier_id = kind, tier_id
    worker.spills.clear()
    worker.hello()


def nodes(worker: FakeWorker) -> list[Node]:
    return list(audit.nodes_of(worker.world.manager.worker(worker.id)))


def num_hashes(worker: FakeWorker) -> int:
    return sum(len(node.hashes) for node in nodes(worker)) // HASH_BYTES


@pytest.mark.parametrize("late", [False, True])
def test_selective_spills_for_a_tier_that_came_late(late: bool) -> None:
    world = World(spill=SpillPolicy.SELECTIVE)
    worker = FakeWorker(world, [full(8)], 2, host_tier=HostTierKind.SHARED, host_tier_id="redis")
    if late:
        worker = FakeWorker(world, [full(8)], 2, "w1")
        say(worker, HostTierKind.SHARED, "redis")
    for _ in range(3):
        worker.run(span(1, 9))
    world.tick()
    worker.spill_all()
    assert len(worker.store) == 4


def test_keys_of_a_tier_that_came_late_name_the_whole_prefix() -> None:
    """Two prompts share tokens at different places: their pages must not share a key."""
    world = stage(watch=False)
    first, late = join(world, full(16)), FakeWorker(world, [full(16)], 2, "w1")
    late.run([1, 2, 3, 4, 5])
    say(late, HostTierKind.SHARED, "redis")
    first.run([7, 8, 9, 10, 11])
    spill(first)
    asked = late.start([1, 2, 3, 4, 7, 8, 9, 10, 6])
    assert asked.fetch is None and asked.grant.usable_tokens == 4
    late.prefill(asked)
    late.release(asked)
    spill(late)
    churn(late)
    back = late.start([1, 2, 3, 4, 7, 8, 9, 10, 6, 6])
    assert back.fetch is not None and back.fetch.num_pages == 4
    late.fetch_all(back)
    late.prefill(back)


@pytest.mark.parametrize("tier", [HostTierKind.NONE, HostTierKind.SHARED])
def test_nothing_is_hashed_before_somebody_needs_it(tier: HostTierKind) -> None:
    world = World(spill=SpillPolicy.SELECTIVE)
    worker = FakeWorker(
        world, [full(16)], 2, host_tier=tier, host_tier_id="redis" if tier == HostTierKind.SHARED else ""
    )
    live = worker.start(span(1, 8))
    worker.prefill(live)
    worker.decode(live, span(20, 27))
    worker.release(live)
    assert num_hashes(worker) == 0
    world.manager.match(NS, pack([*span(1, 6), 0, 0, 0]))
    assert (num_hashes(worker) > 0) == (tier == HostTierKind.SHARED)


def test_events_are_made_while_somebody_watches() -> None:
    world = World()
    worker = FakeWorker(world, [full(16)], 2)
    worker.run(span(1, 5))
    assert not world.events and num_hashes(worker) == 0
    world.manager.watch(True)
    worker.run(span(1, 9))
    (stored,) = world.events
    assert isinstance(stored, Stored) and stored.tokens == pack(span(5, 8))
    whole = page_hash.page_hashes(page_hash.namespace_digest(NS), b"", pack(span(1, 8)), 8)
    assert (stored.parent_hash, b"".join(stored.page_hashes)) == (whole[32:64], whole[64:])
    world.manager.watch(False)
    worker.run(span(50, 55))
    assert len(world.events) == 1


def test_many_workers_are_asked_about_a_prompt_that_is_hashed_once(monkeypatch: Any) -> None:
    world = stage(watch=False)
    first = join(world, full(40))
    prompt = span(1, 60)
    first.run(prompt)
    while world.tick() or first.spills:
        first.spill_all()
    others = [join(world, full(40), name=f"v{number}") for number in range(20)]
    others[0].run(span(1, 21))
    hashed = 0
    count = page_hash.page_hashes

    def counted(digest: bytes, parent: bytes, tokens: bytes, page_bytes: int) -> bytes:
        nonlocal hashed
        hashed += len(tokens) // page_bytes
        return count(digest, parent, tokens, page_bytes)

    monkeypatch.setattr(page_hash, "page_hashes", counted)
    found = {match.worker_id: match.match for match in world.manager.match(NS, pack([*prompt, 0, 0]))}
    assert hashed <= 31
    assert {match.host_tokens for name, match in found.items() if name not in (first.id, others[0].id)} == {60}
    assert (found[others[0].id].usable_tokens, found[others[0].id].host_tokens) == (20, 40)
