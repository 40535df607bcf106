"""The rolling snapshot of a sequence that ends or is preempted: published only if no launch wrote a later boundary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from session.messages import Release
from session.words import GroupKind, GroupSpec, ReleaseReason, SequenceId
from tests.worker_service.scheduler_machine import NAMESPACE, VOCAB, Machine, full_group, reference
from worker_service.core.scheduler_config import SchedulerConfig

GROUPS = (full_group(64), GroupSpec("state", GroupKind.STATE, 16, 0))
CONFIG = SchedulerConfig(4, GROUPS, max_model_len=64, vocab_size=VOCAB, token_budget=64, max_num_seqs=8)
PROMPT = [1, 2, 3, 4, 5]


def decoding(computed_len: int) -> tuple[Machine, SequenceId]:
    """A sequence with that many tokens computed, whose next launch is in flight."""
    driven = Machine(CONFIG)
    asked = driven.ask(PROMPT, max_tokens=40)
    driven.turn()
    while driven.launches[-1].rows[0].first_token < computed_len:
        driven.turn()
    return driven, asked


def release_of(driven: Machine) -> Release:
    step = driven.scheduler.next_step()
    assert step is not None
    driven.apply(driven.manager.step(step))
    (release,) = step.releases
    return release


@pytest.mark.parametrize(
    ("computed_len", "rolling_tokens"),
    [(6, 0), (7, 0), (8, 8), (9, 8), (10, 8), (11, 0), (12, 12)],
)
def test_a_launch_in_flight_that_crosses_a_boundary_leaves_none(computed_len: int, rolling_tokens: int) -> None:
    driven, asked = decoding(computed_len)
    driven.stop(asked)
    release = release_of(driven)
    assert (release.reason, release.rolling_tokens) == (ReleaseReason.FINISHED, rolling_tokens)
    driven.end_launch()
    driven.check_over()


def test_a_launch_that_has_landed_since_counts_too() -> None:
    driven, asked = decoding(11)
    driven.stop(asked)
    driven.end_launch()
    assert release_of(driven).rolling_tokens == 0
    driven.check_over()


@pytest.mark.parametrize("computed_len", range(8, 13))
def test_the_next_turn_never_restores_a_later_state(computed_len: int) -> None:
    """Its memory says what each snapshot holds: resuming at 8 from the state of 12 is another prefix's state."""
    driven, asked = decoding(computed_len)
    driven.stop(asked)
    driven.exchange()
    driven.end_launch()
    answer = reference(NAMESPACE, PROMPT, 40)
    driven.ask([*PROMPT, *answer[: computed_len - 4], 49], max_tokens=2)
    driven.run()
    driven.check_over()


def test_rejected_drafts_beyond_a_boundary_leave_none() -> None:
    """A draft that crossed the boundary wrote its state, accepted or not."""
    driven = Machine(CONFIG)
    asked = driven.ask(PROMPT, max_tokens=40)
    driven.turn()
    while driven.launches[-1].rows[0].first_token < 10:
        driven.turn()
    driven.end_launch()
    sequence = driven.scheduler._queues.leased[0]
    assert (sequence.computed_len, sequence.rolling_boundary(4)) == (11, 8)
    sequence.written_len = 12
    driven.stop(asked)
    assert release_of(driven).rolling_tokens == 0


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("computed_len", range(6, 14))
def test_a_preempted_sequence_goes_on_from_its_last_boundary(computed_len: int, queued: bool) -> None:
    """Its lease ends once its launches have; the boundary is that of what they computed."""
    driven, asked = decoding(computed_len)
    if queued:
        driven.exchange()
        assert driven.start_ahead()
    sequence = driven.scheduler._queues.leased[0]
    driven.scheduler._queues.preempt(sequence)
    step = driven.scheduler.next_step()
    if step is not None:
        assert not step.releases, "its launch is still in flight"
        driven.apply(driven.manager.step(step))
    driven.end_launches()
    computed = sequence.computed_len
    assert computed == computed_len + 1 + queued
    release = release_of(driven)
    boundary = computed // 4 * 4
    rolling = boundary if boundary > len(PROMPT) else 0
    assert (release.reason, release.rolling_tokens) == (ReleaseReason.PREEMPTED, rolling)
    driven.scheduler.retry_refused()  # as an idle engine does: nothing else is there to be freed
    driven.run()
    driven.check_over()
    usage = driven.clients[asked].usage
    assert usage is not None and usage.num_preemptions == 1
    # The prompt, then what lies behind the snapshot, the token without KV included; 4 is the prompt's own boundary.
    assert usage.computed_tokens == len(PROMPT) + computed + 1 - (rolling or 4)


def test_a_starving_pool_preempts_and_resumes() -> None:
    """Two long answers in a pool for one and a half: the younger one goes on from where it was, time after time."""
    groups = (full_group(20), GroupSpec("state", GroupKind.STATE, 16, 0))
    driven = Machine(replace(CONFIG, groups=groups))
    for number in range(2):
        driven.ask([number, *PROMPT], max_tokens=44)
    driven.run()
    driven.check_over()
    usages = [client.usage for client in driven.clients.values()]
    assert sum(usage.num_preemptions for usage in usages if usage is not None) > 0
    (stats,) = driven.manager.manager.stats().workers
    assert stats.groups[1].num_snapshots_taken > 2
