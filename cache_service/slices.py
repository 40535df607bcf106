"""Runs long work of the manager on the event loop in short slices, so that Steps are answered in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import TypeVar, cast

Result = TypeVar("Result")

# A Step waits at most for this and for one slice more.
SLICE_S = 0.005


async def in_slices(slices: Generator[None, None, Result], flush: Callable[[], None] = lambda: None) -> Result:
    """Returns the generator's result; `flush` is called after each turn."""
    while True:
        end = time.perf_counter() + SLICE_S
        try:
            while time.perf_counter() < end:
                next(slices)
        except StopIteration as done:
            flush()
            return cast(Result, done.value)
        flush()
        await asyncio.sleep(0)
