"""Hybrid models: where snapshots are left and restored. The ids in test names are those of docs/cases.md."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from session.messages import Refusal
from session.words import MissReason, RefusalReason
from tests.core.driver import FakeWorker
from tests.core.oracle import Oracle
from tests.core.test_cases_pages import span, spare
from tests.core.world import ABORTED, PREEMPTED, World, full, state, window
from tests.examples import examples


def make(page_tokens: int, *groups: object) -> FakeWorker:
    return FakeWorker(World(watch=True), groups, page_tokens)  # type: ignore[arg-type]


def hybrid(page_tokens: int, num_pages: int = 64, slots: int = 32) -> FakeWorker:
    return make(page_tokens, full(num_pages), state(slots))


def computed(worker: FakeWorker, tokens: list[int], chunk: int = 0) -> int:
    return len(tokens) - worker.run(tokens, chunk=chunk).usable_tokens


def test_h1_shared_starts_compute_each_token_once() -> None:
    worker = hybrid(256)
    start, second, rest = span(1, 256), span(1001, 1256), span(2001, 2288)
    r0 = start + span(5001, 5044)
    r1 = start + second + rest
    r2 = start + second + span(3001, 3288)
    r3 = start + second + span(4001, 4288)
    r4 = r1[:768] + span(6001, 6332)
    assert [len(r) for r in (r0, r1, r2, r3, r4)] == [300, 800, 800, 800, 1100]
    assert [computed(worker, r) for r in (r0, r1)] == [300, 544]
    assert computed(worker, r2) == 544, "512 tokens match, but only the state at 256 exists"
    assert computed(worker, r4) == 332
    assert computed(worker, r3) == 288, "the divergence left a state at 512"


def test_h2_aligned_prompts_back_off_to_a_state() -> None:
    worker = hybrid(256)
    short, long = span(1, 256), span(1, 512)
    assert [computed(worker, p) for p in (short, short, long, long)] == [256, 256, 256, 256]


def test_h3_m24_evicting_pages_takes_their_state() -> None:
    worker = hybrid(256, num_pages=2, slots=4)
    worker.run(span(1, 300))
    worker.run(span(1001, 1300))
    assert computed(worker, span(1, 300)) == 300


@pytest.mark.parametrize("prompt", [800, 813, 860, 1000, 1100, 2000])
def test_h4_h4b_m6_m9b_the_last_whole_page_has_a_state(prompt: int) -> None:
    worker = hybrid(256)
    worker.run(span(1, prompt), chunk=300)
    boundary = (prompt - 1) // 256 * 256
    live = worker.start([*span(1, boundary), *span(9001, 9100)])
    assert live.grant.usable_tokens == boundary


@pytest.mark.parametrize("chunk", [300, 256, 128, 0])
def test_h4b_m9c_an_aligned_prompt_leaves_its_replay_boundary(chunk: int) -> None:
    worker = hybrid(256)
    worker.run(span(1, 1024), chunk=chunk)
    assert worker.world.tokens_cached(span(1, 1024)) == 768
    assert worker.world.tokens_cached([*span(1, 1024), 7]) == 1024


@pytest.mark.parametrize(("prompt", "hit"), [(32, 16), (48, 32), (33, 32)])
def test_h4b_twice_the_same_prompt(prompt: int, hit: int) -> None:
    worker = hybrid(16)
    worker.run(span(1, prompt))
    live = worker.start(span(1, prompt))
    assert live.grant.usable_tokens == hit
    worker.prefill(live)


@settings(max_examples=examples(60))
@given(prompt=st.integers(1, 70), page=st.sampled_from([1, 2, 4, 8]), chunk=st.integers(0, 20), lag=st.booleans())
def test_h4b_every_length_and_budget_leaves_the_last_boundary(prompt: int, page: int, chunk: int, lag: bool) -> None:
    worker = hybrid(page, num_pages=160, slots=160)
    live = worker.start(span(1, prompt), chunk=chunk)
    worker.prefill(live, chunk, publish=not lag)
    if lag:
        worker.publish(live)
    worker.release(live)
    assert worker.world.tokens_cached(span(1, prompt)) == (prompt - 1) // page * page
    worker.prefill(worker.start(span(1, prompt)))


def test_h6_counts_of_computed_tokens() -> None:
    worker = hybrid(32)
    assert [computed(worker, span(1, 133)), computed(worker, span(1, 133))] == [133, 5]
    other = hybrid(32)
    assert [computed(other, span(1, 128)), computed(other, span(1, 192))] == [128, 64]


@pytest.mark.parametrize("hybrid_model", [False, True])
def test_h7_equal_prompts_share_and_fall_once(hybrid_model: bool) -> None:
    worker = make(4, full(64), *([state(64)] if hybrid_model else []))
    lives = [worker.start(span(1, 12))]
    worker.prefill(lives[0])
    for _ in range(9):
        lives.append(worker.start(span(1, 12)))
        worker.prefill(lives[-1])
    assert len({tuple(live.table()) for live in lives}) == 1
    assert spare(worker) == 64 - 3
    longer = worker.start([*span(1, 12), *span(50, 57)])
    assert spare(worker) == 64 - 5
    worker.prefill(longer)


def test_h13_m20_cached_tokens_are_those_really_skipped() -> None:
    worker = hybrid(256, slots=3)
    live = worker.start(span(1, 768 + 1), chunk=256)
    worker.prefill(live, 256)
    worker.release(live)
    probe = worker.start([*span(1, 768), 5])
    assert probe.grant.match.matched_tokens == 768
    worker.release(probe, ABORTED)
    grant = worker.run([*span(1, 512), *span(9000, 9256)])
    assert grant.cached_tokens == grant.usable_tokens
    assert grant.match.matched_tokens == 512 and grant.match.usable_tokens == grant.usable_tokens
    if grant.usable_tokens < 512:
        assert grant.match.limiting_group == "state"
        assert grant.match.miss_reason == MissReason.NO_SNAPSHOT


def test_case_41_the_divergence_boundary_gets_its_snapshot() -> None:
    """Eight pages of KV, a state at 32 only: a prompt that leaves at 16 computes them again, and leaves one."""
    worker = hybrid(4)
    worker.run(span(1, 33))
    shared = [*span(1, 16), *span(70, 80)]
    first = worker.start(shared)
    assert (first.grant.match.matched_tokens, first.grant.usable_tokens) == (16, 0)
    (stats,) = worker.world.manager.stats().workers
    assert (stats.matched_tokens, stats.cached_tokens) == (16, 0), "resident, and of no use"
    assert 16 in {slot.boundary_tokens for slot in first.grant.snapshots}
    worker.prefill(first)
    assert worker.world.tokens_cached([*span(1, 16), *span(90, 95)]) == 16


def test_case_42_a_chain_falls_back_to_an_older_snapshot() -> None:
    worker = make(256, full(64), window(64, 128), state(32))
    worker.run(span(1, 257))
    worker.run(span(1, 513))
    worker.run(span(1, 769))
    for limit, hit in ((320, 256), (600, 512), (1000, 768)):
        assert worker.world.tokens_cached([*span(1, 769), *span(5000, 5300)][:limit]) == hit


def test_h18_m27_snapshots_are_optional_and_live_slots_are_not() -> None:
    worker = hybrid(4, slots=4)
    first = worker.start(span(1, 17))
    worker.prefill(first)
    second = worker.start(span(101, 117))
    assert second.grant.snapshots == (), "all four slots are live: no snapshot, and no refusal"
    refusal = worker.refused(span(201, 217))
    assert refusal.reason == RefusalReason.NO_ROOM
    worker.prefill(second)
    worker.release(first)
    assert isinstance(worker.start(span(201, 217)), object)


def test_m30_without_spare_slots_pages_are_shared_and_nothing_is_skipped() -> None:
    worker = hybrid(4, slots=2)
    worker.run(span(1, 17))
    before = spare(worker)
    live = worker.start(span(1, 17))
    assert live.grant.usable_tokens == 0
    assert live.grant.match.matched_tokens == 16
    worker.prefill(live)
    assert spare(worker) >= before - 5


def test_never_fits_does_not_depend_on_what_is_cached() -> None:
    """A hit must not make a prompt harder to admit than no hit at all: on an idle worker it is granted."""
    worker = hybrid(4, slots=3)
    worker.run(span(1, 17))
    for _ in range(3):
        assert not isinstance(worker.submit(span(1, 17)), Refusal)
        for live in list(worker.live.values()):
            worker.prefill(live)
            worker.release(live)
    tight = make(2, full(16), window(3, 4))
    tight.run(span(1, 9), chunk=2)
    live = tight.start(span(1, 9), chunk=4)
    tight.prefill(live, 2)


def test_rolling_slot_is_published_when_a_sequence_ends() -> None:
    worker = hybrid(4)
    oracle = Oracle(worker)
    live = worker.start(span(1, 6))
    worker.prefill(live)
    worker.decode(live, span(7, 15))
    worker.release(live)
    oracle.check()
    turn = worker.start([*span(1, 15), 16, 17])
    assert turn.grant.usable_tokens == 12
    worker.prefill(turn)


def test_rolling_slot_is_published_at_the_boundary_that_it_holds() -> None:
    """The sequence has finished, and a launch that nobody needs has moved the rolling slot on."""
    worker = hybrid(4)
    oracle = Oracle(worker)
    live = worker.start(span(1, 6))
    worker.prefill(live)
    worker.decode(live, [7, 8])
    worker.decode(live, [9, 10, 11, 12], publish=False)
    assert (live.rolled, live.reported) == (12, 8)
    worker.release(live)
    oracle.check()
    assert worker.world.tokens_cached([*span(1, 12), 13]) == 4
    told = worker.start(span(1, 6))
    worker.prefill(told)
    worker.decode(told, span(7, 12))
    worker.step(releases=[worker.release_of(told)._replace(rolling_tokens=0)])
    worker.forget(told)
    assert worker.world.tokens_cached([*span(1, 12), 13]) == 4, "0 says that the slot holds no boundary"


@pytest.mark.parametrize("reason", [ABORTED, PREEMPTED])
def test_rolling_slot_is_true_however_a_sequence_ends(reason: object) -> None:
    """Reports lag behind: the slot may hold a later boundary than the manager was told of."""
    worker = hybrid(4)
    live = worker.start(span(1, 6))
    worker.prefill(live)
    worker.decode(live, span(7, 9))
    worker.decode(live, span(10, 13), publish=False)
    worker.release(live, reason)  # type: ignore[arg-type]
    turn = worker.start([*span(1, 13), 14])
    worker.prefill(turn)


def test_e18_a_match_does_not_touch_and_states_go_oldest_first() -> None:
    worker = hybrid(4, num_pages=64, slots=5)
    for first in (100, 200, 300):
        worker.run(span(first, first + 4))
    assert worker.world.tokens_cached(span(100, 105)) == 4
    live = worker.start(span(400, 404))
    worker.prefill(live)
    hits = [worker.world.tokens_cached(span(first, first + 5)) for first in (100, 200, 300)]
    assert hits == sorted(hits), "the oldest snapshots went first"
    assert hits[0] == 0


def test_m1_h21_an_idle_step_changes_nothing() -> None:
    worker = hybrid(4)
    worker.run(span(1, 17))
    before = worker.world.snapshot()
    worker.step()
    worker.step()
    assert worker.world.snapshot() == before
    assert worker.world.tokens_cached(span(1, 17)) == 16


def test_restore_is_pinned_until_its_launch_is_reported() -> None:
    worker = hybrid(4, num_pages=64, slots=6)
    worker.run(span(1, 9))
    live = worker.start(span(1, 12))
    assert live.grant.usable_tokens == 8
    other = worker.start(span(100, 120))
    worker.prefill(other)
    worker.check_grant(live)
    worker.launch(live)
    worker.publish(live)
