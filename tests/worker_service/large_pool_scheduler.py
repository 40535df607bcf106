"""Schedulers driven over a pool with pages for everything: one configuration, and prompts that share nothing."""

from __future__ import annotations

from dataclasses import replace

from tests.worker_service.scheduler_machine import VOCAB, Machine, full_group
from worker_service.core.scheduler_config import SchedulerConfig

CONFIG = SchedulerConfig(
    page_tokens=16, groups=(full_group(4000),), max_model_len=20_000, vocab_size=VOCAB, token_budget=2048
)


def machine(**changes: object) -> Machine:
    return Machine(replace(CONFIG, **changes))  # type: ignore[arg-type]


def distinct(length: int, start: int) -> list[int]:
    """Prompts whose first pages differ, so that nobody waits for a sibling."""
    return [start, *(token % VOCAB for token in range(length - 1))]


def launches(driven: Machine, *prompts: list[int]) -> list[list[int]]:
    """What each launch computes for prompts that arrive together."""
    for prompt in prompts:
        driven.ask(prompt)
    driven.run()
    driven.check_over()
    return [[row.num_tokens for row in launch.rows] for launch in driven.launches]
