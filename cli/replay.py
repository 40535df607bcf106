"""`stemcache replay`: drives the manager alone with a trace in Mooncake's format.

Knows the command line only; cache_service/replay.py does the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from cache_service.config import POLICIES
from cache_service.replay import Replay, TraceError, make_manager, read_trace, replay
from cli.app import JsonOption, app, check_choice, fail
from cli.output import Output, table


@app.command("replay")
def replay_command(
    trace: Annotated[Path, typer.Argument(help="One JSON object a line: input_length, output_length, hash_ids.")],
    pages: Annotated[int, typer.Option("--pages", min=0, help="Pages of the pool; 0: unlimited.")] = 200_000,
    page_tokens: Annotated[int, typer.Option("--page-tokens", min=1, max=4096)] = 16,
    policy: Annotated[str, typer.Option("--policy", help=f"Eviction policy: {', '.join(POLICIES)}.")] = "lru",
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Only the first ones; default: all.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Acquire, publish and release each request of a trace in turn; print hit rate and speed."""
    check_choice("--policy", policy, POLICIES)
    output = Output(as_json=json_)
    manager = make_manager(pages, page_tokens, policy)
    try:
        with output.working(f"replaying {trace}"):
            figures = replay(manager, read_trace(trace, requests))
    except OSError as error:
        fail(f"{trace}: {error.strerror}")
    except TraceError as error:
        fail(f"{trace}: {error}")
    if not figures.requests:
        fail(f"{trace}: holds no request")
    output.show(_figures_table(figures))
    output.emit(figures._asdict())


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
