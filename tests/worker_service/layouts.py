"""Groups of a worker with pools that are just large enough for one sequence of MAX_LEN tokens."""

from __future__ import annotations

from session.words import GroupKind, GroupSpec
from tests.worker_service.scheduler_machine import PAGE_BYTES, full_group, window_group

MAX_LEN = 24


def full_only(page_tokens: int, budget: int, window: int = 5) -> tuple[GroupSpec, ...]:
    return (full_group(MAX_LEN // page_tokens),)


def two_full(page_tokens: int, budget: int, window: int = 5) -> tuple[GroupSpec, ...]:
    (full,) = full_only(page_tokens, budget)
    return full, full._replace(name="second")


def with_window(page_tokens: int, budget: int, window: int = 5) -> tuple[GroupSpec, ...]:
    num_pages = -(-(window + 2 * budget) // page_tokens) + 3
    return (*full_only(page_tokens, budget), window_group(num_pages, window))


def window_only(page_tokens: int, budget: int, window: int = 5) -> tuple[GroupSpec, ...]:
    return with_window(page_tokens, budget, window)[1:]


def with_state(page_tokens: int, budget: int, window: int = 5) -> tuple[GroupSpec, ...]:
    return (*full_only(page_tokens, budget), GroupSpec("state", GroupKind.STATE, 9, PAGE_BYTES))


def with_intervals(page_tokens: int, budget: int, window: int = 5) -> tuple[GroupSpec, ...]:
    """A state whose prompts leave snapshots on their way, and a window beside it."""
    full, windows = with_window(page_tokens, budget, window)
    state = GroupSpec("state", GroupKind.STATE, 12, PAGE_BYTES, state_interval_tokens=2 * page_tokens)
    return full, windows._replace(num_pages=2 * windows.num_pages), state
