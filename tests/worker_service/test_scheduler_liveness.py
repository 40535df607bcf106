"""Random workloads on pools that are much too small: all requests end, with the right tokens, and nothing is left.

Sessions break, the cache service restarts or is silent while rows take pages by themselves.

The manager is the real one, audited after each step; the memory shows every wrong page.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from session.limits import SessionLimits
from session.words import GroupSpec, Namespace
from tests.examples import examples
from tests.worker_service.audited_manager import LIMITS
from tests.worker_service.layouts import MAX_LEN, full_only, window_only, with_intervals, with_state, with_window
from tests.worker_service.scheduler_machine import VOCAB, Machine
from worker_service.core.scheduler_config import SchedulerConfig

# Far more turns than any of these workloads needs: reaching it is a livelock.
MAX_TURNS = 1_000


Layout = Callable[[int, int, int], tuple[GroupSpec, ...]]


@st.composite
def configs(draw: st.DrawFn, layout: Layout) -> SchedulerConfig:
    page_tokens = draw(st.sampled_from([1, 2, 4]))
    budget = draw(st.sampled_from([4, 8, 16, 64]))
    groups = layout(page_tokens, budget, draw(st.sampled_from([1, 3, 5])))
    return SchedulerConfig(
        page_tokens=page_tokens,
        groups=tuple(spec._replace(num_pages=spec.num_pages + draw(st.integers(0, spec.num_pages))) for spec in groups),
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        token_budget=budget,
        max_num_seqs=draw(st.integers(1, min(budget, 6))),
        max_acquires=draw(st.sampled_from([1, 3, 8])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 4])),
        reserve_pages=draw(st.sampled_from([0, 0, 2])),
        decode_ahead_tokens=draw(st.sampled_from([0, 0, 2, 8])),
        max_decode_ahead_tokens=draw(st.sampled_from([0, 4, 64])),
    )


class Workload:
    """Requests that share prefixes arrive, some are aborted, launches fail, sessions break, the manager restarts."""

    def __init__(
        self, machine: Machine, rng: random.Random, num_requests: int, *, with_faults: bool, ahead: bool
    ) -> None:
        self.machine = machine
        self.rng = rng
        self.num_left = num_requests
        self.with_faults = with_faults
        self.ahead = ahead

    def chance(self, probability: float) -> bool:
        return self.with_faults and self.rng.random() < probability

    def ask(self) -> None:
        alphabet = self.rng.choice([1, 1, 2])
        prompt = [self.rng.randrange(alphabet) for _ in range(self.rng.randint(1, 18))]
        namespace = Namespace("model", salt=self.rng.choice(["", "", "other"]))
        bypasses = self.rng.random() < 0.1
        priority = self.rng.choice([0, 0, 1])
        stops = self.rng.sample(range(VOCAB), 10) if self.rng.random() < 0.3 else ()
        self.machine.ask(
            prompt, self.rng.randint(1, 6), namespace, priority, bypass_cache=bypasses, stop_token_ids=stops
        )
        self.num_left -= 1

    def maybe_abort(self) -> None:
        if self.chance(0.03) and self.machine.clients:
            self.machine.abort(self.rng.choice(list(self.machine.clients)))
        if self.chance(0.03) and self.machine.clients:
            self.machine.stop(self.rng.choice(list(self.machine.clients)))

    def turn(self) -> bool:
        machine = self.machine
        if self.num_left and self.rng.random() < 0.5:
            self.ask()
        self.maybe_abort()
        happened = machine.exchange()
        self.maybe_abort()
        if self.ahead and self.rng.random() < 0.8:
            happened |= machine.start_ahead()
            self.maybe_abort()
        if self.num_left and self.rng.random() < 0.2:  # a request that comes during a launch has a step of its own
            self.ask()
            happened |= machine.exchange()
            self.maybe_abort()
            happened |= machine.exchange()
        if machine.launch is not None and self.chance(0.03):
            machine.end_launch(failed_rows={row for row in range(len(machine.launch.rows)) if self.rng.random() < 0.5})
            happened = True
        happened |= machine.end_launch()
        happened |= machine.move_pages()
        happened |= self.maybe_lose_something()
        return machine.start() or happened

    def maybe_lose_something(self) -> bool:
        if self.machine.scheduler.is_detached:
            if self.rng.random() < 0.15:
                self.machine.find_service(restarted=self.chance(0.3), late_hello=self.chance(0.3))
            return True
        if self.chance(0.03):
            self.machine.lose_service(step_arrived=self.rng.random() < 0.5)
            return True
        if self.chance(0.02):
            self.machine.restart_manager(self.limits())
            return True
        if self.chance(0.04):
            self.machine.lose_session(reply_was_lost=self.rng.random() < 0.5)
            return True
        return False

    def limits(self) -> SessionLimits:
        rng = self.rng
        return LIMITS._replace(
            max_live_sequences=rng.choice([1, 4096]),
            max_step_items=rng.choice([1, 2, 8192]),
            max_adopt_pages=rng.choice([1, 5, 4096]),
            max_kept_bytes=rng.choice([0, 60, 1 << 20]),
        )

    def run(self) -> int:
        for turn in range(MAX_TURNS):
            if not self.turn() and not self.num_left:
                return turn
        raise AssertionError(f"{self.machine.scheduler.num_unfinished} requests never finish")


@pytest.mark.parametrize("layout", [full_only, with_window, window_only, with_state, with_intervals])
@pytest.mark.parametrize("with_faults", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@settings(max_examples=examples(60))
@given(data=st.data(), seed=st.integers(0, 1 << 32), num_requests=st.integers(1, 14), host=st.booleans())
def test_every_request_ends_and_nothing_is_left(
    data: st.DataObject, seed: int, num_requests: int, host: bool, layout: Layout, with_faults: bool, ahead: bool
) -> None:
    config = data.draw(configs(layout))
    rng = random.Random(seed)
    machine = Machine(config, host=host, rng=rng if with_faults else None)
    Workload(machine, rng, num_requests, with_faults=with_faults, ahead=ahead).run()
    machine.check_over()
    usages = [client.usage for client in machine.clients.values() if client.usage is not None]
    event(f"refused: {machine.manager.num_refusals > 0}")
    event(f"preempted: {any(usage.num_preemptions for usage in usages)}")
    event(f"cached: {any(usage.cached_tokens for usage in usages)}")
    event(f"two in flight: {machine.num_queued > 0}")
    event(f"fetched: {any(usage.fetched_tokens for usage in usages)}")
    if not with_faults:
        assert all(client.usage is not None for client in machine.clients.values())
