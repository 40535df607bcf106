"""Whether a Hello, or the groups of an attached engine, make sense in themselves.

Checked when a Hello is decoded, and again by the manager, for callers that decode nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from session.errors import InvalidInput
from session.limits import MAX_GROUPS, MAX_PAGE_TOKENS, MAX_PAGES, MAX_RANKS, MIN_STATE_SLOTS
from session.messages import Hello
from session.words import GroupKind, GroupSpec, HostTierKind


def check_hello(hello: Hello) -> None:
    for name in ("worker_id", "incarnation", "fingerprint"):
        if not getattr(hello, name):
            raise InvalidInput(f"hello.{name}", "must not be empty")
    if not 1 <= hello.page_tokens <= MAX_PAGE_TOKENS:
        raise InvalidInput("hello.page_tokens", f"{hello.page_tokens} is not in 1..{MAX_PAGE_TOKENS}")
    if not 1 <= hello.num_ranks <= MAX_RANKS:
        raise InvalidInput("hello.num_ranks", f"{hello.num_ranks} is not in 1..{MAX_RANKS}")
    if hello.host_tier is HostTierKind.SHARED and not hello.host_tier_id:
        raise InvalidInput("hello.host_tier_id", "a shared host tier needs its identity")
    if hello.started_ns < 0:
        raise InvalidInput("hello.started_ns", "must not be negative")
    check_groups(hello.groups, hello.page_tokens, "hello.groups")


def check_groups(groups: Sequence[GroupSpec], page_tokens: int, field: str) -> None:
    """Raises InvalidInput where the groups contradict each other or the page size; `field` is their name in the
    message."""
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise InvalidInput(field, f"{len(groups)} groups; 1..{MAX_GROUPS} are allowed")
    names = set()
    for number, spec in enumerate(groups):
        where = f"{field}[{number}]"
        if not spec.name:
            raise InvalidInput(f"{where}.name", "must not be empty")
        if spec.name in names:
            raise InvalidInput(field, f"names {spec.name} twice")
        names.add(spec.name)
        if not 1 <= spec.num_pages <= MAX_PAGES:
            raise InvalidInput(f"{where}.num_pages", f"{spec.num_pages} is not in 1..{MAX_PAGES}")
        if spec.page_bytes < 0:
            raise InvalidInput(f"{where}.page_bytes", "must not be negative")
        if (spec.window_tokens >= 1) != (spec.kind == GroupKind.WINDOW) or spec.window_tokens < 0:
            raise InvalidInput(f"{where}.window_tokens", "is for WINDOW groups, which need at least 1")
        _check_state(spec, page_tokens, where)


def _check_state(spec: GroupSpec, page_tokens: int, where: str) -> None:
    interval = spec.state_interval_tokens
    if interval and spec.kind is not GroupKind.STATE:
        raise InvalidInput(f"{where}.state_interval_tokens", "is for STATE groups")
    if interval < 0 or interval % page_tokens:
        reason = f"{interval} is no multiple of page_tokens = {page_tokens}"
        raise InvalidInput(f"{where}.state_interval_tokens", reason)
    if spec.kind is GroupKind.STATE and spec.num_pages < MIN_STATE_SLOTS:
        reason = (
            f"{spec.num_pages} slot; a STATE group needs at least {MIN_STATE_SLOTS}: one for a running sequence, and "
            "one for the snapshot that it resumes from"
        )
        raise InvalidInput(f"{where}.num_pages", reason)
