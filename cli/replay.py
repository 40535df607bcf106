"""`stemcache replay`: drives the manager alone with a trace in Mooncake's format.

Knows the command line only; cache_service/replay.py does the work.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from cache_service.core.errors import CacheError
from cache_service.replay import Replay, Request, make_manager, read_trace, replay
from cli.app import JsonOption, app, fail
from cli.output import Output, table


@app.command("replay")
def replay_command(
    trace: Annotated[Path, typer.Argument(help="One JSON object a line: input_length, output_length, hash_ids.")],
    pages: Annotated[int, typer.Option("--pages", min=0, help="Pages of the pool; 0: unlimited.")] = 200_000,
    page_tokens: Annotated[int, typer.Option("--page-tokens", min=1, max=4096)] = 16,
    policy: Annotated[str, typer.Option("--policy", help="lru, slru or priority.")] = "lru",
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Only the first ones; default: all.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Acquire, publish and release each request of a trace in turn; print hit rate and speed."""
    output = Output(as_json=json_)
    with output.working(f"reading {trace}"):
        expanded = _read(trace, requests)
    try:
        manager = make_manager(pages, page_tokens, policy)
    except CacheError as error:
        fail(str(error))
    with output.working(f"replaying {len(expanded):,} requests"):
        figures = replay(manager, expanded)
    output.show(_figures_table(figures))
    output.emit(figures._asdict())


def _read(trace: Path, num_requests: int | None) -> list[Request]:
    try:
        expanded = list(read_trace(trace, num_requests))
    except OSError as error:
        fail(f"{trace}: {error.strerror}")
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        fail(f"{trace}: not a trace in Mooncake's format ({type(error).__name__}: {error})")
    if not expanded:
        fail(f"{trace}: holds no request")
    return expanded


def _figures_table(figures: Replay) -> RenderableType:
    rows = [
        ("requests", f"{figures.requests:,}"),
        ("requests/s", f"{figures.requests_per_s:,.0f}"),
        ("hit rate", f"{figures.hit_rate:.2%}"),
        ("p50", f"{figures.p50_ms:.3f} ms"),
        ("p99", f"{figures.p99_ms:.3f} ms"),
        ("evicted pages", f"{figures.evicted_pages:,}"),
        ("peak memory", f"{figures.peak_rss_mb:,.0f} MiB"),
    ]
    return table("", ("figure", "value"), rows)
