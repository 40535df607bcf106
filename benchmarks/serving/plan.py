"""The list of cases, the most important ones first, and running one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import NamedTuple

from benchmarks.serving.cases import (
    Bench,
    arrivals,
    behind_prefix,
    burst,
    cache_service_stopped,
    cached_share,
    prompts_alone,
    steady_streams,
)
from benchmarks.serving.figures import Row, without_figures
from benchmarks.serving.load import SHORT_ANSWER, Sizes

KINDS = ("streams", "prompt", "alone", "burst", "arrivals", "share", "stopped")
SHARES = (0, 25, 50, 75, 100)


class Case(NamedTuple):
    """`needed_tokens` (of pages) and `num_seqs` are what it has running at its fullest."""

    row: Row
    run: Callable[[Bench, Row], Awaitable[None]]
    num_seqs: int
    needed_tokens: int = 0


def all_cases(sizes: Sizes) -> Iterator[Case]:
    """The most important ones first."""
    short, *longer = sizes.contexts
    yield from (_streams(sizes, num, short) for num in sizes.streams)
    for length in sizes.prompts:
        yield Case(Row(f"prompt_{length}", "prompt", 1, length, SHORT_ANSWER), prompts_alone, 1)
    yield from _cold_and_cached("alone", 1, sizes, behind_prefix)
    yield from _cold_and_cached("burst", sizes.siblings, sizes, burst)
    yield _beside("arrivals", sizes, sizes.beside_tokens, arrivals)
    for share in SHARES:
        row = Row(f"share_{share}", "share", 1, sizes.share_prompt, SHORT_ANSWER)
        yield Case(row, partial(cached_share, percent=share), 1)
    for context in longer:
        yield from (_streams(sizes, num, context, is_primed=True) for num in sizes.streams)
    yield _beside("stopped", sizes, sizes.open_tokens, cache_service_stopped)


def _streams(sizes: Sizes, num: int, context: int, is_primed: bool = False) -> Case:
    row = Row(f"streams_{num}_{context}", "streams", num, context, sizes.new_tokens)
    return Case(row, partial(steady_streams, is_primed=is_primed), num, num * (context + sizes.new_tokens))


def _cold_and_cached(kind: str, num: int, sizes: Sizes, run: Callable[..., Awaitable[None]]) -> Iterator[Case]:
    for name, is_cached in (("cold", False), ("cached", True)):
        row = Row(f"{kind}_{name}", kind, num, sizes.prefix + sizes.own, SHORT_ANSWER)
        yield Case(row, partial(run, is_cached=is_cached), num)


def _beside(kind: str, sizes: Sizes, new_tokens: int, run: Callable[[Bench, Row], Awaitable[None]]) -> Case:
    """Streams that decode until the case ends them."""
    row = Row(kind, kind, sizes.decoding, sizes.contexts[0], new_tokens)
    # Prompts that arrive must find room in a launch beside the streams.
    return Case(row, run, row.streams + sizes.num_arriving, row.streams * (row.context + new_tokens))


async def measured(bench: Bench, case: Case) -> Row:
    """The case's row; without figures where a check failed or the pages do not suffice."""
    row, pool_tokens = case.row, bench.services.pool_tokens
    if case.needed_tokens > pool_tokens:
        row.skipped = f"needs pages for {case.needed_tokens:,} tokens, and there are {pool_tokens:,}"
        return row
    try:
        await case.run(bench, row)
    except Exception as error:
        row.failures.append(f"{type(error).__name__}: {error}")
    return without_figures(row) if row.failures else row
