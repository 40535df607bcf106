"""Puts a serving run into the README: a table and a plot between two markers, the plot beside the documents.

make bench-serving                     # on an H200: benchmarks/results/serving-h200.json
python -m benchmarks.plot_serving
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.eval_report import README, ROOT, inserted, table_lines
from benchmarks.serving.figures import idle_percent
from benchmarks.serving.plot import serving_plot

REPORT = ROOT / "benchmarks/results/serving-h200.json"
# A run with room for what 20 s decode, asked for by a setting.
STOPPED_REPORT = REPORT.with_name("serving-h200-stopped.json")
# A later run of some cases, whose rows take the place of the first one's.
LATER_REPORT = REPORT.with_name("serving-h200-streams.json")
PLOT = ROOT / "docs/serving-h200.svg"
BEGIN, END = "<!-- serving -->\n", "<!-- end of serving -->\n"
HEAD = (
    "streams",
    "prompt tokens",
    "tokens/s",
    "inter-token p50, p99 ms",
    "launch ms",
    "of it device",
    "idle",
    "TTFT p50 ms",
)
NOT_YET = "`make bench-serving` times what clients of an 8B-shaped model see. No run is part of this repository yet.\n"

Row = Mapping[str, Any]


def readme_block(report: Mapping[str, Any] | None, stopped: Mapping[str, Any] | None = None) -> str:
    """Markdown, markers included; without a report a sentence that says so.

    `stopped` is a run of that case alone, told in place of the report's.
    """
    if report is None:
        return BEGIN + NOT_YET + END
    lines = [
        _what(report),
        "",
        *table_lines(HEAD, [_cells(row) for row in sorted(_rows(report, "streams"), key=_size)]),
    ]
    sentences = [*_alone(report), *_burst(report), *_arrivals(report), *_stopped(stopped or report)]
    plot = f"![First token by the cached share, tokens a second by streams]({PLOT.relative_to(ROOT)})"
    return BEGIN + "\n".join([*lines, "", *(f"- {sentence}" for sentence in sentences), "", plot]) + "\n" + END


def with_later(report: dict[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the report with a later run's rows in place of those of the same name; `later` says which."""
    newer = {row["name"]: row for row in later["rows"]}
    rows = [newer.get(row["name"], row) for row in report["rows"]]
    return {**report, "rows": rows, "later": {"commit": later["commit"], "names": sorted(newer)}}


def _rows(report: Mapping[str, Any], kind: str) -> list[Row]:
    """Those that have figures."""
    return [row for row in report["rows"] if row["kind"] == kind and row["ttft_ms_p50"] is not None]


def _size(row: Row) -> tuple[int, int]:
    return row["context"], row["streams"]


def _what(report: Mapping[str, Any]) -> str:
    clients = report["clients"]
    return (
        f"What clients see (`make bench-serving`, commit {report['commit']}; {report['model']}, {report['dtype']}, "
        f"{report.get('gpu', report['device'])}, random prompts, {clients} client process{'es' * (clients > 1)} over "
        f"loopback gRPC; every row's tokens were checked){_later(report)}:"
    )


def _later(report: Mapping[str, Any]) -> str:
    if "later" not in report:
        return ""
    names, commit = report["later"]["names"], report["later"]["commit"]
    return f"; {', '.join(f'`{name}`' for name in names)} of a later run on another card of the kind, commit {commit}"


def _cells(row: Row) -> list[str]:
    times = f"{_figure(row['itl_ms_p50'], '.2f')}, {_figure(row['itl_ms_p99'], '.2f')}" if row["itl_ms_p50"] else ""
    launch = [_figure(row[key], ".2f") for key in ("wall_ms", "device_ms")]
    return [
        f"{row['streams']}",
        f"{row['context']:,}" + (f", {row['cached_tokens']:,} cached" if row["cached_tokens"] else ""),
        _figure(row["tokens_per_s"], ",.0f"),
        times,
        *launch,
        idle_percent(row["idle_share"]),
        _figure(row["ttft_ms_p50"], ",.1f"),
    ]


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _alone(report: Mapping[str, Any]) -> list[str]:
    """First tokens of prompts alone, and of one behind a prefix."""
    prompts = [f"{row['context']:,} tokens {row['ttft_ms_p50']:.1f} ms" for row in _rows(report, "prompt")]
    made = [f"First token of a prompt alone, median: {', '.join(prompts)}."] if prompts else []
    for row in _rows(report, "alone"):
        if row["cached_tokens"]:
            made.append(f"{_behind(row)} alone: {row['ttft_ms_p50']:.1f} ms.")
    return made


def _behind(row: Row) -> str:
    return f"{row['cached_tokens']:,} cached and {row['context'] - row['cached_tokens']:,} own tokens"


def _burst(report: Mapping[str, Any]) -> list[str]:
    times = [
        f"{row['name'].removeprefix('burst_')} {row['ttft_ms_min']:.0f}, {row['ttft_ms_p50']:.0f} and "
        f"{row['ttft_ms_max']:.0f} ms"
        for row in _rows(report, "burst")
    ]
    rows = _rows(report, "burst")[:1]
    return [
        f"{row['streams']} prompts of {row['context']:,} tokens at once behind one prefix of "
        f"{row['cached_tokens']:,}, first token of the first, the median and the last: {'; '.join(times)}."
        for row in rows
    ]


def _arrivals(report: Mapping[str, Any]) -> list[str]:
    return [
        f"While prompts of {row['detail']['arriving']:,} tokens arrive every {row['detail']['every_s']:g} s, "
        f"{row['streams']} streams decode with an inter-token p99 of {row['itl_ms_p99']:.1f} ms; their median before "
        f"is {row['detail']['quiet_itl_ms_p50']:.1f} ms."
        for row in _rows(report, "arrivals")
        if "quiet_itl_ms_p50" in row["detail"]
    ]


def _stopped(report: Mapping[str, Any]) -> list[str]:
    rows = _rows(report, "stopped")
    pools = ["in a pool full of cached prompts " if "filled_tokens" in row["detail"] else "" for row in rows]
    return [
        f"With the cache service stopped for {row['detail']['stopped_s']:.0f} s, the longest silence of "
        f"{row['streams']} decoding streams {pool}is {row['silence_ms_max']:,.0f} ms."
        for row, pool in zip(rows, pools, strict=True)
    ]


def read_report(path: Path = REPORT) -> dict[str, Any] | None:
    """Returns the committed run, None while there is none."""
    if not path.is_file():
        return None
    report: dict[str, Any] = json.loads(path.read_text())
    later = read_report(LATER_REPORT) if path == REPORT else None
    return with_later(report, later) if later else report


def main() -> None:
    report = read_report()
    README.write_text(inserted(README.read_text(), readme_block(report, read_report(STOPPED_REPORT)), BEGIN, END))
    if report is not None:
        PLOT.write_text(serving_plot(report))


if __name__ == "__main__":
    main()
