"""What the cache service takes from a worker: limits at submit, in steps and after a reconnect; items refused alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from session.limits import SessionLimits
from session.messages import Refusal, Step, StepReply
from session.wire.seal import seal_request
from session.wire.step import encode_step
from session.words import Namespace, RefusalReason
from tests.worker_service.audited_manager import LIMITS
from tests.worker_service.scheduler_machine import VOCAB, Machine, full_group
from worker_service.core.errors import InvalidField
from worker_service.core.scheduler_config import SchedulerConfig

CONFIG = SchedulerConfig(
    page_tokens=4, groups=(full_group(200),), max_model_len=500, vocab_size=VOCAB, token_budget=64, max_num_seqs=8
)


def machine(limits: SessionLimits = LIMITS, **changes: object) -> Machine:
    driven = Machine(replace(CONFIG, **changes))  # type: ignore[arg-type]
    driven.restart_manager(limits)
    return driven


def next_step(driven: Machine) -> Step:
    step = driven.scheduler.next_step()
    assert step is not None
    return step


def usage_of(driven: Machine, sequence_id: int):
    usage = driven.clients[sequence_id].usage  # type: ignore[index]
    assert usage is not None
    return usage


# -- at submit --


def test_a_prompt_beyond_the_service_s_limit_names_it() -> None:
    driven = machine(LIMITS._replace(max_sequence_tokens=64))
    with pytest.raises(InvalidField, match=r"prompt: 64 tokens .* max_sequence_tokens = 64 of the cache service"):
        driven.ask([1] * 64)
    driven.ask([1] * 63)
    with pytest.raises(InvalidField, match="max_model_len = 500"):
        machine().ask([1] * 500)


def test_a_prompt_that_no_message_holds_is_named_too() -> None:
    driven = machine(LIMITS._replace(max_message_bytes=8192))
    with pytest.raises(InvalidField, match="max_message_bytes = 8192"):
        driven.ask([1] * 200)


@pytest.mark.parametrize("name", ["salt", "adapter"])
def test_a_name_beyond_the_service_s_limit_is_named(name: str) -> None:
    driven = machine()
    with pytest.raises(InvalidField, match=f"{name}: has 257 characters, more than max_name_chars = 256"):
        driven.ask([1], namespace=Namespace("model")._replace(**{name: "x" * 257}))


def test_a_running_sequence_ends_at_the_limit() -> None:
    driven = machine(LIMITS._replace(max_sequence_tokens=20))
    running = driven.ask([1] * 10, max_tokens=30)
    driven.run()
    assert usage_of(driven, running).generated_tokens == 10
    assert not driven.manager.leases


# -- in steps --


def test_long_prompts_go_out_one_by_one() -> None:
    """Eight at once would be a message that ends the stream."""
    most = 6_000
    limits = LIMITS._replace(max_message_bytes=most, max_name_chars=16)
    driven = machine(limits)
    for number in range(6):
        driven.ask([number] * 300)
    num_steps = 0
    while driven.scheduler.num_waiting:
        step = next_step(driven)
        num_steps += 1
        assert len(step.acquires) <= 2
        assert len(seal_request(encode_step(step)).SerializeToString()) <= most
        driven.apply(driven.manager.step(step))
        while driven.start():
            driven.end_launch()
    assert num_steps >= 3
    driven.run()
    driven.check_over()


def test_never_more_leases_than_the_service_takes() -> None:
    driven = machine(LIMITS._replace(max_live_sequences=2))
    for number in range(6):
        driven.ask([number] * 9, max_tokens=3)
    while driven.turn():
        assert len(driven.manager.leases) <= 2
    driven.check_over()


def test_few_items_for_each_step_end_all_requests() -> None:
    driven = machine(LIMITS._replace(max_step_items=1))
    for number in range(12):
        driven.ask([number % 4] * (5 + number), max_tokens=6)
    driven.run()
    driven.check_over()


# -- after a reconnect --


def test_smaller_limits_fail_the_requests_beyond_them_alone() -> None:
    driven = machine(max_num_seqs=2)
    runs, beyond = driven.ask([1] * 10, max_tokens=20), driven.ask([2] * 60, max_tokens=20)
    named = driven.ask([3] * 5, namespace=Namespace("model", salt="x" * 100))
    for _ in range(3):
        driven.turn()
    driven.end_launch()
    waits = driven.ask([4] * 45)
    driven.restart_manager(LIMITS._replace(max_sequence_tokens=50, max_name_chars=64))
    assert "max_sequence_tokens = 50" in driven.clients[beyond].failed
    assert driven.clients[named].failed.startswith("salt: has 100 characters")
    driven.adopt_all()
    driven.run()
    assert usage_of(driven, runs).generated_tokens == 20
    assert usage_of(driven, waits).generated_tokens == 1
    driven.check_over()


@pytest.mark.parametrize("num_tokens", [30, 31])
def test_answers_that_smaller_limits_leave_no_room_end_there(num_tokens: int) -> None:
    """Their prompts are within the limits, so that the callers asked for nothing that is not served."""
    driven = machine()
    ends, goes_on = driven.ask([1] * 20, max_tokens=100), driven.ask([2] * 5, max_tokens=12)
    while len(driven.clients[ends].tokens) < num_tokens - 20:
        driven.turn()
        driven.end_launches()
    driven.restart_manager(LIMITS._replace(max_sequence_tokens=30))
    assert (driven.clients[ends].failed, usage_of(driven, ends).generated_tokens) == ("", num_tokens - 20)
    driven.adopt_all()
    driven.run()
    assert usage_of(driven, goes_on).generated_tokens == 12
    driven.check_over()


def test_an_answer_that_waits_for_its_turn_ends_there_too() -> None:
    driven = machine()
    ids = [driven.ask([number] * 20, max_tokens=100) for number in range(2)]
    while len(driven.clients[ids[1]].tokens) < 20:
        driven.turn()
    driven.restart_manager(LIMITS._replace(max_live_sequences=1))
    assert driven.scheduler.num_waiting == 1
    driven.restart_manager(LIMITS._replace(max_sequence_tokens=30))
    for number in ids:
        assert usage_of(driven, number).generated_tokens >= 20 and not driven.clients[number].failed
    driven.run()
    driven.check_over()


def test_fewer_live_sequences_queue_the_youngest_again() -> None:
    driven = machine()
    ids = [driven.ask([number] * 6, max_tokens=10) for number in range(4)]
    for _ in range(4):
        driven.turn()
    driven.end_launch()
    driven.restart_manager(LIMITS._replace(max_live_sequences=2))
    driven.adopt_all()
    assert driven.manager.adopted == ids[:2]
    driven.run()
    driven.check_over()


# -- items refused alone --


def invalid(sequence_id: int, field: str) -> Refusal:
    return Refusal(sequence_id, RefusalReason.INVALID, "has 300 characters", field)  # type: ignore[arg-type]


def test_an_invalid_acquire_fails_alone() -> None:
    driven = machine()
    good, bad = driven.ask([1] * 9, max_tokens=5), driven.ask([2] * 9, max_tokens=5)
    step = next_step(driven)
    reply = driven.manager.step(step._replace(acquires=step.acquires[:1]))
    driven.apply(reply._replace(refusals=(invalid(bad, "step.acquires[1].namespace.salt"),)))
    assert driven.clients[bad].failed == "namespace.salt: has 300 characters"
    driven.run()
    driven.check_over()
    assert usage_of(driven, good).generated_tokens == 5


@pytest.mark.parametrize("kind", ["publishes", "extends"])
def test_an_invalid_publish_or_extend_ends_that_lease_alone(kind: str) -> None:
    driven = machine()
    good, bad = driven.ask([1] * 8, max_tokens=9), driven.ask([2] * 8, max_tokens=9)
    reply = None
    while reply is None:
        step = next_step(driven)
        items = getattr(step, kind)
        if any(item.sequence_id == bad for item in items):
            kept = tuple(item for item in items if item.sequence_id != bad)
            reply = driven.manager.step(step._replace(**{kind: kept}))
            driven.apply(reply._replace(refusals=(*reply.refusals, invalid(bad, f"step.{kind}[0].tokens"))))
        else:
            driven.apply(driven.manager.step(step))
        driven.end_launch()
        driven.start()
    assert driven.clients[bad].failed
    driven.end_launch()
    driven.clients[bad].tokens.clear()
    driven.run()
    driven.check_over()
    assert usage_of(driven, good).generated_tokens == 9


def test_a_refused_release_changes_nothing() -> None:
    driven = machine()
    aborted = driven.ask([1] * 8, max_tokens=9)
    driven.turn()
    driven.end_launch()
    driven.abort(aborted)
    step = next_step(driven)
    reply: StepReply = driven.manager.step(step)
    driven.apply(reply._replace(refusals=(invalid(aborted, "step.releases[0].sequence_id"),)))
    driven.check_over()
