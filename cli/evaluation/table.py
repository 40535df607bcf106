"""The evaluation's table: one row for each way, with accuracy, tokens, hits, time to the first token, same text.

Nothing is cut on a terminal of 80 columns: there titles and questions move below the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from cli.evaluation.result import Marks, WayResult
from cli.output import milliseconds, plain, stacked, table

# From here on the titles have a column.
TITLES_FROM_COLUMNS = 110
COLUMNS = ("one\nfact", "two\nfacts", "prompt", "cached", "fetched", "computed", "hits", "TTFT", "same\ntext")


def eval_table(results: Sequence[WayResult], num_columns: int) -> RenderableType:
    """For a terminal of `num_columns`."""
    titled = num_columns >= TITLES_FROM_COLUMNS
    head = ("", "the prefix", "asked") if titled else ("",)
    rows = [
        [number, *([plain(result.title), result.questions] if titled else []), *_numbers(result)]
        for number, result in enumerate(results, start=1)
    ]
    numbers = table("", (*head, *COLUMNS), rows, left=2 if titled else 1)
    return stacked((numbers, _remarks(results, titles=not titled)))


def _numbers(result: WayResult) -> tuple[object, ...]:
    """A row's cells behind its title."""
    if not result.questions:
        return ("[red]failed[/red]", *[""] * (len(COLUMNS) - 1))
    counts = (result.prompt, result.cached, result.fetched, result.computed)
    hits = f"{result.hit_share:.1%}" if result.warm else "-"
    same = "yes" if result.same_text == result.questions else f"[red]{result.same_text}[/red]"
    return (_share(result.one_fact), _share(result.two_facts), *counts, hits, milliseconds(result.first_token_s), same)


def _share(marks: Marks) -> str:
    return "-" if marks.accuracy is None else f"{marks.accuracy:.1%}"


def _remarks(results: Sequence[WayResult], *, titles: bool) -> RenderableType:
    remarks = Table.grid(padding=(0, 2))
    for number, result in enumerate(results, start=1):
        lines = [f"[bold]{plain(result.title)}[/bold], {result.questions} questions"] if titles else []
        lines += [plain(f"{what}: {count:,}") for what, count in result.proof.items()]
        lines += [f"[red]failed: {plain(failure)}[/red]" for failure in result.failures]
        for at, line in enumerate(lines):
            remarks.add_row(f" {number}" if at == 0 else "", line)
    return remarks
