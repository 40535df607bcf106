"""Work in slices, done at once: for callers that nobody waits for."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar, cast

_Result = TypeVar("_Result")


def to_the_end(slices: Generator[None, None, _Result]) -> _Result:
    """Runs every slice; returns what the generator returns."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return cast(_Result, end.value)
