"""`stemcache replay`: drives the manager alone with a trace in Mooncake's format, once or for a table.

replay.py does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import RenderableType

from cache_service.core.device.eviction_order import POLICIES
from cli.app import JsonOption, app, check_choice, fail
from cli.output import Output, table
from cli.replay.replay import Replay, Request, TraceError, make_manager, read_trace, replay

UNITS = {"k": 1_000, "m": 1_000_000}
MAX_RUNS = 64


class Setup(NamedTuple):
    policy: str
    num_pages: int


class Run(NamedTuple):
    """One replay's configuration and its figures."""

    setup: Setup
    figures: Replay


@app.command("replay")
def replay_command(
    trace: Annotated[Path, typer.Argument(help="One JSON object a line: input_length, output_length, hash_ids.")],
    pages: Annotated[
        str, typer.Option("--pages", help="Pages of the pool, or several: 50k,200k,0; 0: unlimited.")
    ] = "200k",
    page_tokens: Annotated[int, typer.Option("--page-tokens", min=1, max=4096)] = 16,
    policy: Annotated[
        str, typer.Option("--policy", help=f"Eviction policy, or several: {','.join(POLICIES)}.")
    ] = "adaptive",
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Only the first ones; default: all.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Acquire, publish and release each request of a trace in turn; print hit rate and speed."""
    policies = [name.strip() for name in policy.split(",")]
    for name in policies:
        check_choice("--policy", name, POLICIES)
    setups = [Setup(name, size) for name in policies for size in page_counts(pages)]
    if len(setups) > MAX_RUNS:
        raise typer.BadParameter(f"{len(setups)} runs are more than {MAX_RUNS}", param_hint="--policy, --pages")
    output = Output(as_json=json_)
    runs = _replayed(trace, requests, setups, page_tokens, output)
    if len(runs) == 1:
        output.show(_figures_table(runs[0].figures))
        output.emit(runs[0].figures._asdict())
        return
    output.show(_runs_table(runs))
    output.emit({"runs": [{**run.setup._asdict(), **run.figures._asdict()} for run in runs]})


def page_counts(text: str) -> list[int]:
    """`50k,200k` as numbers. Raises BadParameter."""
    return [_page_count(part.strip().lower()) for part in text.split(",")]


def _page_count(text: str) -> int:
    digits, factor = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not (digits.isascii() and digits.isdigit()) or int(digits) * factor >= 2**31:
        raise typer.BadParameter(f"{text!r} is no number of pages, such as 200000 or 200k", param_hint="--pages")
    return int(digits) * factor


def _replayed(
    trace: Path, num_requests: int | None, setups: list[Setup], page_tokens: int, output: Output
) -> list[Run]:
    """Ends the command when the trace cannot be read or holds nothing."""
    try:
        total = _count_requests(trace, num_requests)
        runs = []
        for setup in setups:
            name = f"replaying {trace}" + (f", {setup.policy}, {_size(setup.num_pages)}" if len(setups) > 1 else "")
            with output.counting(name, total) as advance:
                manager = make_manager(setup.num_pages, page_tokens, setup.policy)
                runs.append(Run(setup, replay(manager, _counted(read_trace(trace, num_requests), advance))))
    except OSError as error:
        fail(f"{trace}: {error.strerror}")
    except TraceError as error:
        fail(f"{trace}: {error}")
    if not runs[0].figures.requests:
        fail(f"{trace}: holds no request")
    return runs


def _count_requests(trace: Path, num_requests: int | None) -> int:
    with trace.open("rb") as lines:
        count = sum(1 for _ in lines)
    return count if num_requests is None else min(count, num_requests)


def _counted(requests: Iterator[Request], advance: Callable[[], None]) -> Iterator[Request]:
    for request in requests:
        advance()
        yield request


def _figures_table(figures: Replay) -> RenderableType:
    rows = [
        ("requests", figures.requests),
        ("requests/s", f"{figures.requests_per_s:,.0f}"),
        ("hit rate", f"{figures.hit_rate:.2%}"),
        ("p50", f"{figures.p50_ms:.3f} ms"),
        ("p99", f"{figures.p99_ms:.3f} ms"),
        ("evicted pages", figures.evicted_pages),
        ("peak memory", f"{figures.peak_rss_mb:,.0f} MiB"),
    ]
    return table("", ("figure", "value"), rows)


def _runs_table(runs: list[Run]) -> RenderableType:
    """Without the peak memory, which is that of the whole process, all runs so far together."""
    rows = []
    for (policy, num_pages), figures in runs:
        times = (f"{figures.requests_per_s:,.0f}", f"{figures.p50_ms:.3f} ms", f"{figures.p99_ms:.3f} ms")
        rows.append((policy, _size(num_pages), f"{figures.hit_rate:.2%}", *times, figures.evicted_pages))
    columns = ("policy", "pages", "hit rate", "requests/s", "p50", "p99", "evicted pages")
    return table(f"{runs[0].figures.requests:,} requests", columns, rows)


def _size(num_pages: int) -> str:
    return f"{num_pages:,}" if num_pages else "unlimited"
