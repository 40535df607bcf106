"""Clear and Explain with all their slices done at once: nothing comes between them."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar, cast

from cache_service.core.base.stats import ClearResult
from cache_service.core.base.types import Explanation
from cache_service.core.cache_manager import CacheManager
from session.words import Namespace, WorkerId

Result = TypeVar("Result")


def to_the_end(slices: Generator[None, None, Result]) -> Result:
    """Runs every slice; returns what the generator returns."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return cast(Result, end.value)


def clear_at_once(manager: CacheManager, namespace: Namespace | None, unused_only: bool) -> ClearResult:
    """Raises LeasesInScope."""
    return to_the_end(manager.clearing(namespace, unused_only))


def explain_at_once(
    manager: CacheManager, namespace: Namespace, tokens: bytes, worker_id: WorkerId | None = None
) -> tuple[Explanation, ...]:
    return to_the_end(manager.explaining(namespace, tokens, worker_id, 0))
