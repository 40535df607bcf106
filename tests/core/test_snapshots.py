"""Where snapshots are taken beyond a prompt's end and its branch: at intervals, at chunks' ends, where others part."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from session.limits import MAX_SNAPSHOT_BOUNDARIES
from session.messages import Acquire, Extend
from session.words import RefusalReason, SequenceId
from tests.core.at_once import explain_at_once
from tests.core.driver import FakeWorker
from tests.core.oracle import Oracle
from tests.core.test_cases_pages import span
from tests.core.world import ABORTED, FINISHED, NS, PREEMPTED, Live, World, full, pack, state, window
from tests.examples import examples


def hybrid(slots: int, interval: int = 0, page_tokens: int = 4, num_pages: int = 512) -> FakeWorker:
    return FakeWorker(World(watch=True), (full(num_pages), state(slots, interval=interval)), page_tokens)


def left_by(worker: FakeWorker, prompt: list[int], chunk: int = 0) -> list[int]:
    """Boundaries at which the prompt's whole run was granted slots."""
    live = worker.start(prompt, chunk=chunk)
    worker.prefill(live, chunk)
    worker.release(live)
    return sorted(boundary for _, boundary in live.snapshots)


@pytest.mark.parametrize(("interval", "left_at", "cached"), [(512, 2048, 2048), (512, 2300, 2048), (0, 2048, 0)])
def test_a_document_that_is_left_in_the_middle(interval: int, left_at: int, cached: int) -> None:
    worker = hybrid(32, interval, page_tokens=64)
    worker.run(span(1, 4096))
    grant = worker.run([*span(1, left_at), *span(9001, 9100)])
    assert (grant.cached_tokens, grant.match.matched_tokens) == (cached, left_at // 64 * 64)
    if not interval:
        assert worker.run([*span(1, left_at), *span(8001, 8100)]).cached_tokens == left_at, "the branch left one"


def test_every_multiple_gets_a_snapshot_however_the_prompt_is_cut() -> None:
    for chunk in (0, 5, 8, 12, 30):
        worker = hybrid(64, 16)
        left = left_by(worker, span(1, 70), chunk)
        assert {16, 32, 48, 64, 68} <= set(left)
        for boundary in (16, 32, 48, 64):
            assert worker.world.tokens_cached([*span(1, boundary), 999]) == boundary


def test_a_chunk_end_gets_a_vacant_slot() -> None:
    worker = hybrid(32)
    assert left_by(worker, span(1, 50), chunk=10) == [8, 20, 28, 40, 48]
    assert worker.world.tokens_cached([*span(1, 20), 999]) == 20


def test_guesses_leave_two_slots_and_take_those_of_other_guesses() -> None:
    """11 slots: two for the sequence, one for its end, eight boundaries; two stay for the next sequence."""
    worker = hybrid(11, 8)
    live = worker.start(span(1, 70))
    assert sorted(boundary for _, boundary in live.snapshots) == [16, 32, 48, 64, 68], "every other one, evenly"
    second = worker.submit(span(1001, 1010))
    assert isinstance(second, Live) and second.rolling, "it got its working and its rolling slot"
    worker.prefill(live)
    worker.prefill(second)
    worker.release(live)
    worker.release(second)
    for start in range(2000, 4000, 100):
        worker.run(span(start, start + 69))
    (stats,) = worker.world.manager.stats().workers
    assert stats.groups[1].num_free >= 2, "the pool is never filled with guesses"


def test_a_guess_evicts_no_wanted_snapshot() -> None:
    """Prompts of two pages fill the pool with what they left; a long prompt gets its end, and nothing else."""
    worker = hybrid(10, 8)
    starts = range(1000, 1800, 100)
    for start in starts:
        worker.run(span(start, start + 8))
    live = worker.start(span(1, 66))
    assert sorted(boundary for _, boundary in live.snapshots) == [64]
    worker.prefill(live)
    kept = [start for start in starts if worker.world.tokens_cached([*span(start, start + 8), 9]) == 8]
    assert len(kept) == 8 - 1, "one of the eight made room for the end of the long prompt"


def test_a_known_branch_gets_its_snapshot_before_anybody_branches() -> None:
    worker = hybrid(16)
    oracle = Oracle(worker)
    live = worker.start(span(1, 50), chunk=20, leave_at=[12, 32])
    worker.prefill(live, 20)
    oracle.check()
    assert {12, 32} <= {boundary for _, boundary in live.snapshots}
    assert worker.run([*span(1, 32), *span(901, 909)]).cached_tokens == 32
    assert worker.run([*span(1, 12), *span(801, 809)]).cached_tokens == 12


def test_an_extend_names_branches_that_became_known() -> None:
    worker = hybrid(16)
    live = worker.start(span(1, 50), chunk=20)
    worker.launch(live, 20)
    worker.publish(live)
    assert worker.extend(live, 40, leave_at=[8, 24])
    assert {boundary for _, boundary in live.snapshots} == {20, 24, 40}, "8 has been passed"
    worker.launch(live, 20)
    worker.publish(live)
    assert worker.run([*span(1, 24), *span(901, 909)]).cached_tokens == 24


def test_a_branch_counts_as_wanted_where_a_guess_was() -> None:
    """A snapshot at an interval is the first to go; once another prompt is known to part there it is not."""
    worker = hybrid(12, 8)
    live = worker.start(span(1, 21))
    assert {boundary for _, boundary in live.snapshots} == {8, 16, 20}
    assert worker.extend(live, 21, leave_at=[8])
    worker.prefill(live)
    worker.release(live)
    orders = worker.world.manager.worker("w0").sparse[0].pages.order()  # type: ignore[arg-type]
    assert [len(pages) for pages in orders.values()] == [1, 2], "16 is cold; 8 and 20 are warm"


@pytest.mark.parametrize("boundary", [0, 6, -4])
def test_a_branch_that_is_no_boundary_is_refused_alone(boundary: int) -> None:
    worker = hybrid(16)
    before = worker.world.snapshot()
    bad = Acquire(SequenceId(99), NS, pack(span(1, 20)), leave_at=(4, boundary))
    (refusal,) = worker.raw_step(acquires=[bad]).refusals
    assert (refusal.reason, refusal.field) == (RefusalReason.INVALID, "step.acquires[0].leave_at")
    assert worker.world.snapshot() == before
    live = worker.start(span(1, 20))
    (refusal,) = worker.raw_step(extends=[Extend(SequenceId(live.id), 24, (boundary,))]).refusals
    assert (refusal.reason, refusal.field) == (RefusalReason.INVALID, "step.extends[0].leave_at")


def test_branches_are_bounded() -> None:
    worker = hybrid(100)
    many = tuple(4 * page for page in range(1, MAX_SNAPSHOT_BOUNDARIES + 2))
    (refusal,) = worker.raw_step(acquires=[Acquire(SequenceId(99), NS, pack(span(1, 600)), leave_at=many)]).refusals
    assert refusal.field == "step.acquires[0].leave_at"
    live = worker.start(span(1, 600), chunk=4, leave_at=many[:-1])
    for start in range(300, 600, 4):
        worker.extend(live, 4, leave_at=range(start, start + 4, 4))
    (lease,) = worker.world.manager.worker("w0").leases.all()  # type: ignore[arg-type]
    assert len(lease.leave_at) == MAX_SNAPSHOT_BOUNDARIES


def test_a_window_beside_the_state_is_kept_at_a_known_branch() -> None:
    """Window pages that are left behind go first, but for those that a known branch needs."""
    worker = FakeWorker(World(watch=True), (full(512), window(24, 8), state(16)), 4)
    live = worker.start(span(1, 60), chunk=12, leave_at=[24])
    worker.prefill(live, 12)
    worker.release(live)
    for start in (1000, 2000):
        worker.run(span(start, start + 39), chunk=12)
    assert worker.run([*span(1, 24), *span(901, 909)]).cached_tokens == 24


# Rolling snapshots.


@pytest.mark.parametrize(("reason", "cached"), [(FINISHED, 12), (PREEMPTED, 12), (ABORTED, 4)])
def test_the_rolling_snapshot_outlives_a_preemption(reason: object, cached: int) -> None:
    worker = hybrid(8)
    live = worker.start(span(1, 6))
    worker.prefill(live)
    worker.decode(live, span(7, 14))
    worker.release(live, reason)  # type: ignore[arg-type]
    again = worker.start(span(1, 15))
    assert again.grant.cached_tokens == cached
    worker.prefill(again)


def test_a_preemption_with_an_unreported_launch_publishes_no_later_boundary() -> None:
    """The slot holds 12 and the manager was told of 8: what it holds stands for no published page."""
    worker = hybrid(8)
    oracle = Oracle(worker)
    live = worker.start(span(1, 6))
    worker.prefill(live)
    worker.decode(live, [7, 8])
    worker.decode(live, [9, 10, 11, 12], publish=False)
    worker.release(live, PREEMPTED)
    oracle.check()
    assert worker.world.tokens_cached(span(1, 13)) == 4


# What is counted.


def test_snapshots_are_counted_by_group() -> None:
    worker = hybrid(16, 8)
    worker.run(span(1, 21))
    worker.run([*span(1, 16), *span(901, 903)])
    worker.run([*span(1, 12), *span(801, 803)])
    (stats,) = worker.world.manager.stats().workers
    full_stats, states = stats.groups
    assert (full_stats.num_snapshots_taken, full_stats.limited_tokens) == (0, 0)
    # 8, 16, 20; none; 12.
    assert (states.num_snapshots_taken, states.num_snapshots_restored) == (4, 2)
    assert states.limited_tokens == 4, "of the last prompt 12 tokens matched, and 8 were used"


def test_explain_names_the_snapshots_of_a_prompt() -> None:
    worker = hybrid(16, 8)
    worker.run(span(1, 21))
    (told,) = explain_at_once(worker.world.manager, NS, pack([*span(1, 15), 99]))
    assert told.notes == (
        "The KV is cached, but group state has no snapshot at a later boundary.",
        "Snapshots of group state in the matched tokens: 1; the last at 8.",
    )


# Every length.


@settings(max_examples=examples(60), deadline=None)
@given(
    prompt=st.integers(1, 90),
    page=st.sampled_from([1, 2, 4, 8]),
    interval=st.integers(0, 4),
    chunk=st.integers(0, 24),
    hints=st.sets(st.integers(1, 20), max_size=3),
)
def test_every_wanted_snapshot_is_there(prompt: int, page: int, interval: int, chunk: int, hints: set[int]) -> None:
    worker = hybrid(256, interval * page, page, 256)
    leave_at = sorted(boundary * page for boundary in hints)
    live = worker.start(span(1, prompt), chunk=chunk, leave_at=leave_at)
    worker.prefill(live, chunk)
    worker.release(live)
    wanted = {(prompt - 1) // page * page, prompt // page * page, *leave_at}
    if interval:
        wanted.update(range(interval * page, prompt + 1, interval * page))
    for boundary in wanted:
        if 0 < boundary <= prompt:
            assert worker.world.tokens_cached([*span(1, boundary), 10_000]) == boundary
