"""The scheduler against the real cache manager, step by step, with audits and a memory that shows every wrong page."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from session.words import GroupKind, GroupSpec
from tests.examples import examples
from tests.worker_service.real_machine import RealMachine
from tests.worker_service.scheduler_machine import VOCAB, full_group, window_group
from tests.worker_service.test_scheduler_liveness import MAX_LEN, Workload
from worker_service.core.scheduler import SchedulerConfig


def config_of(rng: random.Random, groups: Callable[[int, int], tuple[GroupSpec, ...]]) -> SchedulerConfig:
    page_tokens = rng.choice([1, 2, 4])
    budget = rng.choice([4, 8, 16])
    return SchedulerConfig(
        page_tokens=page_tokens,
        groups=groups(page_tokens, budget),
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        token_budget=budget,
        max_num_seqs=rng.randint(1, 4),
        max_acquires=rng.choice([1, 3, 8]),
        long_prefill_token_threshold=rng.choice([0, 4]),
        reserve_pages=rng.choice([0, 0, 2]),
    )


def full_only(page_tokens: int, budget: int) -> tuple[GroupSpec, ...]:
    return (full_group(MAX_LEN // page_tokens)._replace(page_bytes=64),)


def with_window(page_tokens: int, budget: int) -> tuple[GroupSpec, ...]:
    window = 5
    num_pages = -(-(window + 2 * budget) // page_tokens) + 3
    return (*full_only(page_tokens, budget), window_group(num_pages, window)._replace(page_bytes=32))


def window_only(page_tokens: int, budget: int) -> tuple[GroupSpec, ...]:
    return with_window(page_tokens, budget)[1:]


def with_state(page_tokens: int, budget: int) -> tuple[GroupSpec, ...]:
    return (*full_only(page_tokens, budget), GroupSpec("state", GroupKind.STATE, 9, 16))


@pytest.mark.parametrize("groups", [full_only, with_window, window_only, with_state])
@pytest.mark.parametrize("with_faults", [False, True])
@settings(max_examples=examples(50))
@given(seed=st.integers(0, 1 << 32), num_requests=st.integers(1, 12), host=st.booleans())
def test_every_answer_is_right(
    seed: int,
    num_requests: int,
    host: bool,
    groups: Callable[[int, int], tuple[GroupSpec, ...]],
    with_faults: bool,
) -> None:
    rng = random.Random(seed)
    machine = RealMachine(config_of(rng, groups), host=host, rng=rng if with_faults else None)
    Workload(machine, rng, num_requests, with_faults=with_faults).run()
    machine.check_over()
    assert with_faults or all(client.usage is not None for client in machine.clients.values())
    usages = [client.usage for client in machine.clients.values() if client.usage is not None]
    event(f"refused: {machine.real.num_refusals > 0}")
    event(f"preempted: {any(usage.num_preemptions for usage in usages)}")
    event(f"cached: {any(usage.cached_tokens for usage in usages)}")
    event(f"fetched: {any(usage.fetched_tokens for usage in usages)}")
