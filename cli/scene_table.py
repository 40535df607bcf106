"""The demo's tables: what each scene reused, how soon the first token came, whether answers agree, what they say.

Nothing is cut on a terminal of 80 columns: there the titles move below the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from cli.output import milliseconds, plain, stacked, table
from cli.stage import SceneResult, Shown

NUMBERS = ("requests", "prompt", "cached", "fetched", "computed", "TTFT\ncold", "TTFT\nwarm", "same\nanswer")
# From here on the titles have a column, of 20 and more.
TITLES_FROM_COLUMNS = 100
TIES = "{} of the compared answers parted from their cold run at a tie: they reuse what decode wrote in 16 bits"


def scene_table(results: Sequence[SceneResult], num_columns: int) -> RenderableType:
    """Returns the table for a terminal of `num_columns`."""
    titled = num_columns >= TITLES_FROM_COLUMNS
    head = ("", "scene") if titled else ("",)
    rows = [[result.number, *([plain(result.title)] if titled else []), *_numbers(result)] for result in results]
    numbers = table("", (*head, *NUMBERS), rows, left=len(head))
    sentences = [_sentences(results)] if any(result.shown for result in results) else []
    return stacked((numbers, *sentences, _remarks(results, titles=not titled)))


def _numbers(result: SceneResult) -> tuple[object, ...]:
    if result.skipped:
        return ("[yellow]skipped[/yellow]", *[""] * (len(NUMBERS) - 1))
    counts = (result.requests, result.prompt, result.cached, result.fetched, result.computed)
    same = ("ties" if result.ties else "yes") if result.same_answer else "[red]NO[/red]"
    # A scene that broke off has counted and timed nothing.
    times = ("", "") if not result.requests else (milliseconds(result.cold_s), milliseconds(result.warm_s))
    return (*counts, *times, same)


def _remarks(results: Sequence[SceneResult], *, titles: bool) -> RenderableType:
    remarks = Table.grid(padding=(0, 2))
    for result in results:
        lines = [f"[bold]{plain(result.title)}[/bold]"] if titles else []
        lines += [plain(result.note)] if result.note else []
        lines += [TIES.format(result.ties)] if result.ties else []
        lines += [f"[yellow]skipped: {plain(result.skipped)}[/yellow]"] if result.skipped else []
        lines += [f"[red]failed: {plain(failure)}[/red]" for failure in result.failures]
        for at, line in enumerate(lines):
            remarks.add_row(f" {result.number}" if at == 0 else "", line)
    return remarks


def _sentences(results: Sequence[SceneResult]) -> RenderableType:
    """Returns questions, answers and saved tokens side by side."""
    rows = [
        (result.number if at == 0 else "", *_sentence(shown))
        for result in results
        for at, shown in enumerate(result.shown)
    ]
    return table("", ("", "question", "answer", "saved"), rows, left=3)


def _sentence(shown: Shown) -> tuple[str, str, str]:
    mark = "" if shown.right else " [red](wrong)[/red]"
    return plain(shown.question), plain(shown.answer) + mark, f"{shown.saved:,} of {shown.prompt:,}"
