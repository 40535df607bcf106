"""What waiting requests cost: prompts cross the wire once; requests that bypass the cache wait for nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from session.messages import Step
from session.words import MissReason, RefusalReason
from tests.worker_service.audited_manager import LIMITS
from tests.worker_service.scheduler_machine import VOCAB, Machine, full_group
from worker_service.core.scheduler_config import SchedulerConfig

PAGE = 16
LONG = 2048
CONFIG = SchedulerConfig(
    page_tokens=PAGE,
    groups=(full_group(160),),
    max_model_len=LONG + 300,
    vocab_size=VOCAB,
    token_budget=512,
    max_num_seqs=64,
)


def machine(max_kept_bytes: int, **changes: object) -> Machine:
    driven = Machine(replace(CONFIG, **changes))  # type: ignore[arg-type]
    driven.restart_manager(LIMITS._replace(max_kept_bytes=max_kept_bytes))
    return driven


def steps_of(driven: Machine) -> list[Step]:
    """Run to the end; returns every step."""
    steps: list[Step] = []
    original = driven.manager.step

    def step(said: Step):
        steps.append(said)
        return original(said)

    driven.manager.step = step  # type: ignore[method-assign]
    driven.run()
    driven.check_over()
    return steps


@pytest.mark.parametrize(("max_kept_bytes", "most"), [(1 << 20, 1.2), (0, 5.0), (3 * 4 * LONG, 2.0)])
def test_waiting_prompts_cross_the_wire_once(max_kept_bytes: int, most: float) -> None:
    """Ten long prompts wait behind a pool that holds one, while short requests end: sent bytes per granted byte."""
    driven = machine(max_kept_bytes)
    for number in range(20):
        driven.ask([number] * 64, max_tokens=20 + 5 * number, priority=1)
    for number in range(10):
        driven.ask([20 + number] * LONG, max_tokens=100)
    granted = sum(len(client.prompt) * 4 for client in driven.clients.values())
    steps = steps_of(driven)
    assert driven.manager.sent_bytes <= most * granted
    assert sum(len(acquire.tokens) for step in steps for acquire in step.acquires) == driven.manager.sent_bytes


def test_after_a_refusal_the_head_asks_alone() -> None:
    driven = machine(0)
    runs = driven.ask([1] * LONG, max_tokens=50)
    for number in range(2, 7):
        driven.ask([number] * LONG)
    for _ in range(8):
        driven.turn()
    assert driven.manager.num_refusals == 5
    driven.end_launch()
    driven.abort(runs)
    step = driven.scheduler.next_step()
    assert step is not None
    assert len(step.acquires) == 1
    driven.apply(driven.manager.step(step))
    driven.run()
    driven.check_over()


def test_a_preempted_prompt_is_kept_with_its_answer() -> None:
    driven = machine(1 << 20, groups=(full_group(24),), max_model_len=24 * PAGE)
    for number in range(3):
        driven.ask([number] * 100, max_tokens=90)
    steps = steps_of(driven)
    preempted = {client.usage.num_preemptions for client in driven.clients.values() if client.usage is not None}
    assert max(preempted) >= 1
    again = [acquire for step in steps for acquire in step.acquires if acquire.kept_tokens > 100]
    assert again
    assert all(len(acquire.tokens) // 4 < PAGE for acquire in again)


def test_what_the_service_kept_no_longer_is_sent_again_at_once() -> None:
    driven = machine(1 << 20)
    first, second = driven.ask([1] * LONG, max_tokens=30), driven.ask([2] * LONG)
    driven.turn()
    driven.turn()
    assert driven.manager.cache.kept.drop(second)
    driven.end_launch()
    driven.abort(first)
    step = driven.scheduler.next_step()
    assert step is not None
    assert [(acquire.kept_tokens, acquire.tokens) for acquire in step.acquires] == [(LONG, b"")]
    reply = driven.manager.step(step)
    assert [refusal.reason for refusal in reply.refusals] == [RefusalReason.RESEND]
    driven.apply(reply)
    step = driven.scheduler.next_step()
    assert step is not None
    assert [(acquire.sequence_id, acquire.kept_tokens) for acquire in step.acquires] == [(second, 0)]
    driven.apply(driven.manager.step(step))
    driven.run()
    driven.check_over()


def test_a_new_state_of_the_service_has_kept_nothing() -> None:
    driven = machine(1 << 20)
    driven.ask([1] * LONG, max_tokens=30)
    driven.ask([2] * LONG)
    driven.turn()
    driven.turn()
    driven.end_launch()
    driven.restart_manager()
    steps = steps_of(driven)
    first = next(step.acquires for step in steps if step.acquires)
    assert [acquire.kept_tokens for acquire in first] == [0] * len(first)


# -- requests that bypass the cache --


def test_a_request_that_bypasses_the_cache_holds_nobody_and_is_not_held() -> None:
    driven = machine(0)
    prompt = [7] * 200
    for bypasses in (False, True, True):
        driven.ask(prompt, max_tokens=3, bypass_cache=bypasses)
    driven.turn()
    assert driven.scheduler.num_held == 0
    assert driven.scheduler.num_running == 3
    driven.run()
    driven.check_over()
    usages = [client.usage for client in driven.clients.values()]
    assert [usage.computed_tokens for usage in usages if usage is not None] == [200] * 3


def test_a_bypassing_request_reuses_and_leaves_nothing() -> None:
    driven = machine(0)
    prompt = [7] * 200
    computed = []
    for bypasses in (True, False, True, False):
        asked = driven.ask(prompt, bypass_cache=bypasses)
        driven.run()
        usage = driven.clients[asked].usage
        assert usage is not None
        computed.append(usage.computed_tokens)
    assert computed == [200, 200, 200, 200 - 192]
    driven.check_over()


def test_usage_says_what_the_first_admission_found() -> None:
    driven = machine(0)
    prompt = [7] * 200
    driven.ask(prompt)
    driven.run()
    asked = driven.ask(prompt)
    driven.run()
    usage = driven.clients[asked].usage
    assert usage is not None
    assert (usage.matched_tokens, usage.usable_tokens, usage.limiting_group, usage.miss_reason) == (
        192,
        192,
        "",
        MissReason.PAGE_TAIL,
    )
