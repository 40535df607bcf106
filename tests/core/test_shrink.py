"""Pages that a sequence holds ahead and gives back: they are free at once, and it gets others when it goes on."""

from __future__ import annotations

import pytest

from session.messages import Acquire, Shrink
from session.words import GroupSpec, RefusalReason, SequenceId
from tests.core.driver import FakeWorker
from tests.core.host_stage import stage, warm
from tests.core.test_cases_pages import span
from tests.core.world import World, full, pack, state, window


def num_free(worker: FakeWorker) -> list[int]:
    return [group.num_free for group in worker.world.manager.stats().workers[0].groups]


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize(
    "groups", [(full(20),), (full(20), full(20, "second")), (full(20), window(20, 4)), (window(20, 4),)]
)
def test_pages_ahead_are_free_again_and_come_back_with_an_extend(groups: tuple[GroupSpec, ...], bypass: bool) -> None:
    worker = FakeWorker(World(), groups, 2)
    live = worker.start([1, 2, 3], bypass=bypass)
    worker.prefill(live)
    before = num_free(worker)
    assert worker.extend(live, 20)
    assert num_free(worker) == [free - 8 for free in before]
    assert not worker.shrink(live, 5).refusals
    assert num_free(worker) == [free - 1 for free in before]
    worker.shrink(live, 30)
    assert num_free(worker) == [free - 1 for free in before], "it has no more"
    worker.decode(live, span(4, 14))
    worker.release(live)
    assert worker.world.tokens_cached([*span(1, 14), 99]) == (0 if bypass else 14)


def test_in_the_same_step_they_are_there_for_a_prompt() -> None:
    worker = FakeWorker(World(), (full(10),), 2)
    live = worker.start([1, 2, 3])
    worker.prefill(live)
    assert worker.extend(live, 16)
    acquire = Acquire(SequenceId(9), live.namespace, pack(span(20, 33)))
    assert worker.step(acquires=[acquire]).refusals
    reply = worker.step(shrinks=[Shrink(SequenceId(live.id), 5)], acquires=[acquire])
    worker.shrunk(live, 5)
    assert [grant.sequence_id for grant in reply.grants] == [9]
    assert worker.last_step is not None
    assert worker.world.manager.step(worker.id, worker.last_step, 0) == reply, "a repeated step changes nothing"
    assert num_free(worker) == [0]


def test_snapshot_slots_stay_reserved() -> None:
    worker = FakeWorker(World(), (full(20), state(8)), 2)
    live = worker.start([1, 2, 3])
    worker.prefill(live)
    assert worker.extend(live, 12, [8])
    before = num_free(worker)
    worker.shrink(live, 5)
    assert num_free(worker) == [before[0] + 3, before[1]]
    worker.decode(live, span(4, 12))
    worker.release(live)


@pytest.mark.parametrize(
    ("sequence_id", "num_tokens", "field"), [(1, 2, "num_tokens"), (1, 0, "num_tokens"), (7, 9, "sequence_id")]
)
def test_a_wrong_one_is_refused_alone(sequence_id: int, num_tokens: int, field: str) -> None:
    worker = FakeWorker(World(), (full(20),), 2)
    live = worker.start([1, 2, 3])
    assert worker.extend(live, 12)
    before = worker.world.snapshot()
    (refusal,) = worker.raw_step(shrinks=[Shrink(SequenceId(sequence_id), num_tokens)]).refusals
    assert (refusal.reason, refusal.field) == (RefusalReason.INVALID, f"step.shrinks[0].{field}")
    assert worker.world.snapshot() == before


def test_a_sequence_that_waits_for_its_fetch_gives_nothing_back() -> None:
    world = stage()
    worker = warm(world, full(8))
    live = worker.start(span(1, 10))
    assert live.fetch is not None
    (refusal,) = worker.raw_step(shrinks=[Shrink(SequenceId(live.id), 20)]).refusals
    assert refusal.reason is RefusalReason.INVALID
