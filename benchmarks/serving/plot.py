"""A serving run as a drawing: first tokens by the cached share, tokens a second by streams, as SVG text.

Needs a result's JSON only, and no drawing library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from cli.evaluation.plot import TIME, TWO_FACTS, WIDTH, Panel, bar, drawing

TOP, ROW, FOOT = 64, 26, 12
# Of each of the two panels: room for what stands left of the bars, the bars, and room for the figures behind them.
NAMES, BARS, FIGURES = 120, 220, 80
MIDDLE = WIDTH - NAMES - BARS - FIGURES


class Bar(NamedTuple):
    name: str
    value: float
    figure: str


def serving_plot(report: Mapping[str, Any]) -> str:
    """The same report gives the same text."""
    shares, streams = share_bars(report["rows"]), stream_bars(report["rows"])
    height = TOP + ROW * max(len(shares), len(streams)) + FOOT
    title = f"{report['model']}, {report['dtype']}, {report.get('gpu', report['device'])}, over gRPC"
    length = next((row["context"] for row in share_rows(report["rows"])), 0)
    parts = [
        *_panel(0, f"first token of {length:,} tokens, by what is cached, median", shares, TIME),
        *_panel(MIDDLE, "tokens a second while all decode, streams × prompt tokens", streams, TWO_FACTS),
    ]
    return drawing(title, height, parts)


def share_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One length of prompt at several cached shares; a run without these cases has it cold and behind its prefix."""
    timed = [row for row in rows if row["ttft_ms_p50"] is not None]
    return [row for row in timed if row["kind"] == "share"] or [row for row in timed if row["kind"] == "alone"]


def share_bars(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    found = share_rows(rows)
    return [
        Bar(f"{row['cached_tokens'] / row['context']:.0%} cached", row["ttft_ms_p50"], f"{row['ttft_ms_p50']:,.1f} ms")
        for row in sorted(found, key=lambda row: int(row["cached_tokens"]))
    ]


def stream_bars(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    found = [row for row in rows if row["kind"] == "streams" and row["tokens_per_s"] is not None]
    return [
        Bar(f"{row['streams']} × {row['context']:,}", row["tokens_per_s"], f"{row['tokens_per_s']:,.0f}")
        for row in sorted(found, key=lambda row: (row["context"], row["streams"]))
    ]


def _panel(left: float, title: str, bars: Sequence[Bar], colour: str) -> Iterator[str]:
    panel = Panel(left + NAMES, BARS, max((one.value for one in bars), default=0.0))
    yield f"<text x='{left:g}' y='42' fill='{colour}'>{escape(title)}</text>"
    for number, one in enumerate(bars):
        y = TOP + ROW * number
        yield f"<text x='{panel.left - 12:g}' y='{y + 11}' text-anchor='end'>{escape(one.name)}</text>"
        yield from bar(panel, y, one.value, colour, one.figure)
