"""Where results and progress go: tables on stdout for people, or one JSON object; progress always on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

# A pipe or a log has no width of its own; tables should not be squeezed for it.
PIPE_COLUMNS = 140


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PIPE_COLUMNS)


stderr = _console(stderr=True)


class Output:
    """One command's output. In JSON mode `emit` may be called once, and `show` shows nothing."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = _console(stderr=False)

    def emit(self, value: Mapping[str, object]) -> None:
        """Prints the command's result, in JSON mode."""
        if self.as_json:
            sys.stdout.write(json.dumps(value) + "\n")

    def show(self, *renderables: RenderableType) -> None:
        """Prints the command's result, for people."""
        if not self.as_json:
            for renderable in renderables:
                self.console.print(renderable)

    def show_as_it_is(self, text: str) -> None:
        """Prints a text that another command may read: no line is wrapped."""
        if not self.as_json:
            sys.stdout.write(text.rstrip("\n") + "\n")

    def progress(self, text: str) -> None:
        stderr.print(f"[dim]{escape(text)}[/dim]", soft_wrap=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Shows a spinner on a terminal, one line elsewhere."""
        if not stderr.is_terminal:
            self.progress(text)
            yield
            return
        with stderr.status(escape(text)):
            yield

    @contextmanager
    def counting(self, text: str, total: int) -> Iterator[Callable[[], None]]:
        """Yields a function to call for each of `total` things that are done: a bar on a terminal, one line
        elsewhere."""
        if not stderr.is_terminal:
            self.progress(text)
            yield lambda: None
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=stderr, transient=True) as progress:
            task = progress.add_task(escape(text), total=total)
            yield lambda: progress.advance(task)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> RenderableType:
    """Returns a table whose first `left` columns are text and the others numbers, aligned right.

    Whole numbers get their commas here. A cell's text may be rich markup; what comes from outside goes through `plain`.
    """
    made = Table(
        header_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        # Room for ten columns on a terminal of 80.
        collapse_padding=True,
    )
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < left else "right", no_wrap=number >= left)
    for row in rows:
        made.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    # Not rich's own title, which is folded to the table's width.
    return Group(f"[italic]{title}[/italic]", made) if title else made


def stacked(renderables: Sequence[RenderableType]) -> RenderableType:
    """Returns them one below the other, with an empty line between."""
    return Group(*(part for one in renderables for part in (one, "")))


def plain(text: str) -> str:
    """Returns text that rich prints unchanged, square brackets included."""
    return escape(text)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:,.1f} ms"


def binary_size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes < 10 << 30 else f"{num_bytes / 2**30:,.1f} GiB"
