"""Explain names who holds the pages of a prompt: running sequences, and spills until their acks."""

from __future__ import annotations

from random import Random

from cache_service.core.base.types import Explanation, Holder
from cache_service.core.verbs.holders import MAX_HOLDERS
from session.words import Namespace, SequenceId
from tests.core.at_once import explain_at_once
from tests.core.driver import FakeWorker
from tests.core.host_stage import join, stage
from tests.core.test_cases_pages import span
from tests.core.world import NS, Live, World, full, pack, window

PAGE = 2


def explained(world: World, tokens: list[int], namespace: Namespace = NS) -> Explanation:
    (told,) = explain_at_once(world.manager, namespace, pack(tokens))
    return told


def test_sequences_hold_what_they_share_with_the_prompt() -> None:
    world = World()
    worker = FakeWorker(world, [full(60)], PAGE)
    lives = [worker.start(span(1, 8)), worker.start([*span(1, 4), *span(50, 54)]), worker.start(span(70, 78))]
    assert explained(world, span(1, 9)).holders == (), "nothing is published yet"
    for live in lives:
        worker.prefill(live)
    told = explained(world, span(1, 9))
    assert told.holders == (Holder(SequenceId(lives[0].id), 8), Holder(SequenceId(lives[1].id), 4))
    assert told.num_holders == 2
    assert explained(world, span(1, 9), Namespace("model", "", "other")).holders == ()
    for live in lives:
        worker.release(live)
    assert (explained(world, span(1, 9)).holders, explained(world, span(1, 9)).num_holders) == ((), 0)


def test_a_bounded_number_is_named_and_all_are_counted() -> None:
    world = World()
    worker = FakeWorker(world, [full(200)], PAGE)
    worker.run(span(1, 9))
    lives = [worker.start([*span(1, 4 + number % 3 * 2), 60]) for number in range(MAX_HOLDERS + 5)]
    told = explained(world, span(1, 9))
    assert told.num_holders == len(lives)
    assert [one.num_tokens for one in told.holders] == [8] * 7 + [6] * 7 + [4] * 2


def test_a_spill_holds_what_it_copies_until_its_ack() -> None:
    world = stage()
    worker = join(world, full(20))
    worker.run(span(1, 8))
    assert explained(world, span(1, 9)).spilling_tokens == 8
    assert explained(world, [*span(1, 4), 60, 61]).spilling_tokens == 4
    worker.spill_all()
    assert explained(world, span(1, 9)).spilling_tokens == 0


def test_holders_are_those_whose_published_pages_the_prompt_begins_with() -> None:
    """Random prompts over few tokens, so that nodes split, grow and are shared, on one group and on two."""
    num_named = 0
    for seed in range(20):
        draw = Random(seed)
        world = World()
        worker = FakeWorker(world, [full(200)] if seed % 2 else [full(200), window(200, 4)], PAGE)
        for _ in range(40):
            live = worker.submit([draw.randrange(1, 3) for _ in range(draw.randrange(3, 20))])
            if isinstance(live, Live) and draw.random() < 0.8:
                worker.prefill(live)
            for other in list(worker.live.values()):
                if draw.random() < 0.1:
                    worker.release(other)
            prompt = [draw.randrange(1, 3) for _ in range(20)]
            told = explained(world, prompt)
            found = {one.sequence_id: one.num_tokens for one in told.holders}
            assert found == dict(sorted(by_tokens(world, worker, prompt).items(), key=most_first)[:MAX_HOLDERS])
            num_named += len(found)
    assert num_named > 500


def most_first(held: tuple[int, int]) -> tuple[int, int]:
    return -held[1], held[0]


def by_tokens(world: World, worker: FakeWorker, prompt: list[int]) -> dict[int, int]:
    """From the leases' own tokens, without the tree."""
    matched = explained(world, prompt).match.matched_tokens
    held: dict[int, int] = {}
    for lease in world.manager.worker(worker.id).leases.all():
        tokens = lease.tokens(0, lease.published_pages * PAGE * 4)
        common = 0
        while common < len(tokens) and tokens[common : common + 8] == pack(prompt[:matched])[common : common + 8]:
            common += 8
        if common:
            held[lease.sequence_id] = common // 4
    return held
