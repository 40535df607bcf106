"""The device cache of a worker is offered to a cache service that has lost its state: what comes back, and what not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from session.messages import CachedRun, Forget, Inventory, Step
from session.words import GroupKind, GroupSpec, Namespace
from tests.core.at_once import clear_at_once
from tests.examples import examples
from tests.worker_service.audited_manager import LIMITS, WORKER
from tests.worker_service.inventory_truth import check_inventory
from tests.worker_service.layouts import full_only, two_full, with_state, with_window
from tests.worker_service.scheduler_machine import NAMESPACE, PAGE_BYTES, VOCAB, Machine, full_group, window_group
from tests.worker_service.test_scheduler_liveness import Layout, Workload, configs
from worker_service.core.scheduler_config import SchedulerConfig

STATE = GroupSpec("state", GroupKind.STATE, 40, PAGE_BYTES)
CONFIG = SchedulerConfig(
    page_tokens=4, groups=(full_group(60),), max_model_len=120, vocab_size=VOCAB, token_budget=16, max_num_seqs=8
)
SHAPES = {
    "full": (full_group(60),),
    "two full": (full_group(60), full_group(56)._replace(name="second")),
    "window": (full_group(60), window_group(60, 6)),
    "state": (full_group(60), STATE),
    "all": (full_group(60), window_group(60, 6), STATE),
}
TRUNK = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
PROMPTS = [TRUNK + [20] * 9, TRUNK + [21] * 9, [30] * 30, TRUNK[:6] + [22] * 7]


def machine(shape: str = "full", **changes: object) -> Machine:
    return Machine(replace(CONFIG, **{"groups": SHAPES[shape], **changes}))  # type: ignore[arg-type]


def ask_all(driven: Machine, prompts: list[list[int]], namespace: Namespace = NAMESPACE) -> list[int]:
    """Returns how many tokens of each prompt were cached, asked one after the other."""
    cached = []
    for prompt in prompts:
        asked = driven.ask(prompt, 3, namespace)
        driven.run()
        usage = driven.clients[asked].usage
        assert usage is not None
        cached.append(usage.cached_tokens)
    return cached


def restored(driven: Machine) -> None:
    """The service comes back, and gets the inventory."""
    driven.restart_manager()
    driven.run()
    assert not driven.scheduler.is_restoring
    assert not driven.manager.run_refusals


def offered(step: Step | None) -> list[CachedRun]:
    assert step is not None
    assert isinstance(step.inventory, Inventory)
    return [run for run in step.inventory.runs if isinstance(run, CachedRun)]


@pytest.mark.parametrize("shape", SHAPES)
def test_after_a_restart_of_the_service_every_prompt_hits_as_before(shape: str) -> None:
    driven = machine(shape)
    ask_all(driven, PROMPTS)
    before = ask_all(driven, PROMPTS)
    assert min(before) > 0
    num_known = check_inventory(driven)
    restored(driven)
    assert driven.manager.cache.counters.restored == num_known
    assert ask_all(driven, PROMPTS) == before
    check_inventory(driven)
    driven.check_over()


@pytest.mark.parametrize("shape", SHAPES)
def test_it_comes_back_again_and_again_beside_live_sequences(shape: str) -> None:
    driven = machine(shape)
    ask_all(driven, PROMPTS)
    before = ask_all(driven, PROMPTS)
    live = [driven.ask(PROMPTS[0] + [number] * 5, 30) for number in range(3)]
    for _ in range(3):
        for _ in range(3):
            driven.turn()
        driven.end_launches()
        driven.restart_manager()
        driven.adopt_all()
        driven.turn()
        assert not driven.scheduler.is_restoring
        check_inventory(driven)
    assert ask_all(driven, PROMPTS) >= before
    driven.run()
    assert all(driven.clients[sequence_id].usage for sequence_id in live)
    driven.check_over()


def test_what_finished_while_the_service_was_away_comes_back() -> None:
    driven = machine()
    asked = driven.ask(PROMPTS[2], 1)
    driven.turn()
    driven.turn()
    driven.end_launches()
    assert driven.clients[asked].usage is not None  # its last publish was never sent
    restored(driven)
    assert ask_all(driven, [PROMPTS[2]]) == [28]


@pytest.mark.parametrize("reply_was_lost", [False, True])
def test_what_the_unanswered_step_published_comes_back(reply_was_lost: bool) -> None:
    driven = machine()
    driven.ask(PROMPTS[2], 1)
    driven.turn()
    driven.turn()
    driven.end_launches()
    step = driven.scheduler.next_step()
    assert step is not None and step.publishes and step.releases
    if reply_was_lost:
        driven.manager.step(step)
    restored(driven)
    assert ask_all(driven, [PROMPTS[2]]) == [28]


def test_pages_that_were_computed_twice_come_back_with_what_hangs_on_them() -> None:
    """Two sequences compute the same first pages; one is remapped to the other's, in the step that releases it."""
    driven = machine(token_budget=64)
    for tail in (20, 21):
        driven.ask(TRUNK + [tail] * 9, 1)
    driven.exchange()
    driven.run()
    before = [driven.manager.cached_tokens(NAMESPACE, TRUNK + [tail] * 9) for tail in (20, 21)]
    check_inventory(driven)
    restored(driven)
    assert [driven.manager.cached_tokens(NAMESPACE, TRUNK + [tail] * 9) for tail in (20, 21)] == before == [20, 20]


def test_what_was_evicted_and_not_written_since_comes_back_too() -> None:
    driven = machine(groups=(full_group(30),))
    ask_all(driven, PROMPTS)
    driven.manager.cache.evict(10)
    before = [driven.manager.cached_tokens(NAMESPACE, prompt) for prompt in PROMPTS]
    restored(driven)
    after = [driven.manager.cached_tokens(NAMESPACE, prompt) for prompt in PROMPTS]
    assert all(back >= found for back, found in zip(after, before, strict=True))
    assert sum(after) > sum(before)


def test_a_granted_page_is_known_no_more_before_anything_is_written() -> None:
    driven = machine(groups=(full_group(30),))
    ask_all(driven, PROMPTS)
    driven.ask([40] * 100, 1)
    driven.exchange()  # granted, and nothing runs yet
    assert check_inventory(driven) <= 30 - 25
    driven.end_launches()
    driven.restart_manager()
    assert driven.manager.cached_tokens(NAMESPACE, [40] * 100) == 0
    driven.run()
    driven.check_over()


def test_a_request_that_bypasses_the_cache_leaves_nothing() -> None:
    driven = machine()
    driven.ask(PROMPTS[2], 3, bypass_cache=True)
    driven.run()
    assert driven.scheduler.inventory.num_pages == 0
    driven.restart_manager()
    assert driven.scheduler.next_step() is None


def test_a_model_without_full_attention_offers_nothing() -> None:
    driven = Machine(replace(CONFIG, groups=(window_group(60, 6),)))
    ask_all(driven, PROMPTS)
    driven.restart_manager()
    assert driven.scheduler.next_step() is None
    driven.check_over()


def test_a_service_that_knows_no_inventory_is_offered_none() -> None:
    driven = machine()
    ask_all(driven, PROMPTS)
    driven.end_launches()
    driven.new_manager(LIMITS)
    welcome = driven.manager.hello(0)._replace(capabilities=())
    driven.scheduler.readmit(welcome)
    assert driven.scheduler.next_step() is None


def test_a_worker_that_drains_offers_none() -> None:
    driven = machine()
    ask_all(driven, PROMPTS)
    driven.restart_manager()
    driven.scheduler.withhold_inventory()
    assert driven.scheduler.next_step() is None


# -- slices --


def test_slices_are_bounded_and_their_runs_are_in_order() -> None:
    driven = machine("window")
    ask_all(driven, PROMPTS)
    before = ask_all(driven, PROMPTS)
    driven.restart_manager(LIMITS._replace(max_adopt_pages=5, max_step_items=2))
    numbers: list[int] = []
    while driven.scheduler.is_restoring:
        step = driven.scheduler.next_step()
        runs = offered(step)
        assert sum(len(ids) for run in runs for ids in run.page_ids) <= 5 * 4
        assert len(runs) <= 2
        assert all(run.parent_run < run.run for run in runs)
        numbers += [run.run for run in runs]
        driven.apply(driven.manager.step(step))  # type: ignore[arg-type]
    assert step is not None and step.inventory is not None and step.inventory.is_complete
    assert numbers == list(range(1, len(numbers) + 1))
    assert ask_all(driven, PROMPTS) == before


def test_the_prompt_that_was_used_last_is_evicted_last() -> None:
    driven = machine()
    others = [[number] * 12 for number in range(4)]
    ask_all(driven, others)
    ask_all(driven, others[:1])
    restored(driven)
    driven.manager.cache.evict(9)  # the leaves of three prompts, each of three pages
    assert [driven.manager.cached_tokens(NAMESPACE, prompt) > 0 for prompt in others] == [True, False, False, False]


def test_prompts_that_come_meanwhile_are_served_and_take_pages_that_are_then_not_offered() -> None:
    driven = machine(groups=(full_group(34),))
    ask_all(driven, PROMPTS)
    driven.restart_manager(LIMITS._replace(max_adopt_pages=2))
    meanwhile = driven.ask([40] * 60, 2)
    driven.run()
    assert driven.clients[meanwhile].usage is not None
    check_inventory(driven)
    assert not driven.manager.run_refusals
    assert sum(ask_all(driven, PROMPTS)) > 0
    driven.check_over()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("reply_was_lost", [False, True])
def test_a_break_between_slices_repeats_one_and_goes_on(number: int, reply_was_lost: bool) -> None:
    driven = machine()
    ask_all(driven, PROMPTS)
    before = ask_all(driven, PROMPTS)
    driven.restart_manager(LIMITS._replace(max_adopt_pages=4))
    for _ in range(number):
        driven.exchange()
    assert driven.scheduler.is_restoring
    driven.lose_session(reply_was_lost=reply_was_lost)
    driven.run()
    assert ask_all(driven, PROMPTS) == before


def test_a_service_that_restarts_between_slices_gets_all_of_it() -> None:
    driven = machine()
    ask_all(driven, PROMPTS)
    before = ask_all(driven, PROMPTS)
    driven.restart_manager(LIMITS._replace(max_adopt_pages=4))
    for _ in range(3):
        driven.exchange()
    restored(driven)
    assert ask_all(driven, PROMPTS) == before


# -- Clear --


TENANT = Namespace("model", salt="tenant")


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("unused_only", [False, True])
def test_what_was_cleared_does_not_come_back(everything: bool, unused_only: bool) -> None:
    driven = machine("window")
    ask_all(driven, PROMPTS)
    ask_all(driven, PROMPTS, TENANT)
    clear_at_once(driven.manager.manager, None if everything else TENANT, unused_only)
    assert driven.manager.manager.unconfirmed() == (WORKER,)
    driven.follow_clears()
    assert driven.manager.manager.unconfirmed() == ()
    restored(driven)
    assert driven.manager.cached_tokens(TENANT, PROMPTS[2]) == 0
    assert driven.manager.cached_tokens(NAMESPACE, PROMPTS[2]) == (0 if everything else 28)


def test_what_was_published_after_a_clear_comes_back() -> None:
    driven = machine()
    ask_all(driven, PROMPTS, TENANT)
    clear_at_once(driven.manager.manager, TENANT, unused_only=False)
    driven.follow_clears()
    ask_all(driven, PROMPTS[:1], TENANT)
    restored(driven)
    assert [driven.manager.cached_tokens(TENANT, prompt) > 0 for prompt in PROMPTS[:3:2]] == [True, False]


def test_a_worker_that_was_away_forgets_before_it_offers() -> None:
    """The service dropped its state, or is a new one; the Clear came before the worker was back."""
    driven = machine()
    ask_all(driven, PROMPTS, TENANT)
    driven.end_launches()
    driven.new_manager(LIMITS)
    clear_at_once(driven.manager.manager, TENANT, unused_only=False)
    driven.say_hello()
    driven.run()
    assert driven.manager.cached_tokens(TENANT, PROMPTS[2]) == 0
    assert driven.scheduler.inventory.num_pages == 0


def test_a_publish_whose_reply_is_awaited_is_forgotten_with_its_namespace() -> None:
    driven = machine()
    driven.ask(PROMPTS[2], 1, TENANT)
    driven.turn()
    driven.turn()
    driven.end_launches()
    step = driven.scheduler.next_step()
    assert step is not None and step.publishes
    reply = driven.manager.step(step)
    driven.scheduler.forget(Forget(1, everything=False, namespaces=(TENANT,)))
    driven.apply(reply)
    assert driven.scheduler.inventory.num_pages == 0


# -- everything at once --


class RestartingWorkload(Workload):
    """The same with many restarts, with Clear calls, and with a look at the inventory after each turn."""

    def turn(self) -> bool:
        happened = super().turn()
        check_inventory(self.machine)
        if self.rng.random() < 0.05:
            clear_at_once(
                self.machine.manager.manager,
                self.rng.choice([None, Namespace("model"), Namespace("model", salt="other")]),
                unused_only=True,
            )
        if self.rng.random() < 0.8:
            happened |= self.machine.follow_clears()
        if self.rng.random() < 0.08:
            self.machine.restart_manager(self.limits())
            return True
        return happened


@pytest.mark.parametrize("layout", [full_only, two_full, with_window, with_state])
@pytest.mark.parametrize("with_faults", [False, True])
@settings(max_examples=examples(60))
@given(data=st.data(), seed=st.integers(0, 1 << 32), num_requests=st.integers(1, 14), host=st.booleans())
def test_no_restart_makes_an_answer_wrong(
    data: st.DataObject, seed: int, num_requests: int, host: bool, layout: Layout, with_faults: bool
) -> None:
    config = data.draw(configs(layout))
    rng = random.Random(seed)
    driven = Machine(config, host=host, rng=rng if with_faults else None)
    RestartingWorkload(driven, rng, num_requests, with_faults=with_faults, ahead=True).run()
    driven.run()  # what was aborted at the very end
    driven.check_over()
    # A Clear call may come between two slices.
    taken = [refusal for refusal in driven.manager.run_refusals if "is taken" in refusal.detail]
    assert not taken, "a page was offered that was granted before"
    event(f"restored: {driven.manager.cache.counters.restored > 0}")
