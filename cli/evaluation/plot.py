"""The evaluation as a drawing: for each way two bars of accuracy and one of the time to the first token, as SVG text.

Needs a report's JSON only, and no drawing library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

WIDTH = 860
LEFT, GAP, RIGHT = 230, 40, 70
TOP, ROW, BAR = 64, 40, 13
FOOT = 34
# Light enough for a dark page, dark enough for a light one.
INK, FAINT = "#6b7280", "#9ca3af"
ONE_FACT, TWO_FACTS, TIME = "#3b82f6", "#14b8a6", "#f59e0b"
# The longest bar is then one of reuse, and looks as if reuse were slow.
WAITS = "* with the wait for the earlier request, which computes the prefix"
FONT = "font-family='system-ui, sans-serif' font-size='12'"


class Panel(NamedTuple):
    """A horizontal scale: values 0..`most` from `left` on, `width` wide."""

    left: float
    width: float
    most: float

    def length(self, value: float) -> float:
        return self.width * value / self.most if self.most else 0.0


def eval_plot(report: Mapping[str, Any]) -> str:
    """The same report gives the same text."""
    ways: Sequence[Mapping[str, Any]] = [way for way in report["ways"] if way["questions"]]
    half = (WIDTH - LEFT - GAP - 2 * RIGHT) / 2
    accuracy = Panel(LEFT, half, 1.0)
    times = Panel(LEFT + half + RIGHT + GAP, half, max((way["first_token_s"] for way in ways), default=0.0))
    height = TOP + ROW * len(ways) + FOOT
    parts = [*_heads(accuracy, times)]
    for number, way in enumerate(ways):
        parts += _row(way, TOP + ROW * number, accuracy, times)
    if any(_waits(way) for way in ways):
        parts.append(f"<text x='{WIDTH}' y='{height - 12}' text-anchor='end' fill='{FAINT}'>{WAITS}</text>")
    return drawing(_title(report), height, parts)


def drawing(title: str, height: int, parts: Iterable[str]) -> str:
    """Returns the text of an SVG of the usual width, with its title at the top."""
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}' "
        f"{FONT} fill='{INK}'>",
        f"<title>{escape(title)}</title>",
        f"<text x='0' y='16' font-weight='bold'>{escape(title)}</text>",
    )
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _waits(way: Mapping[str, Any]) -> bool:
    return str(way["way"]) == "sibling"


def _title(report: Mapping[str, Any]) -> str:
    return (
        f"{report['questions']} questions over {report['registers']} registers, {report['dtype']} on {report['device']}"
    )


def _heads(accuracy: Panel, times: Panel) -> Iterator[str]:
    yield (
        f"<text x='{accuracy.left}' y='42'>exact matches: <tspan fill='{ONE_FACT}'>one fact</tspan>, "
        f"<tspan fill='{TWO_FACTS}'>two facts</tspan></text>"
    )
    yield f"<text x='{times.left:g}' y='42' fill='{TIME}'>time to first token, median</text>"


def _row(way: Mapping[str, Any], y: float, accuracy: Panel, times: Panel) -> Iterator[str]:
    middle = y + BAR + 4
    yield f"<text x='{LEFT - 12}' y='{middle}' text-anchor='end'>{escape(str(way['title']))}</text>"
    for offset, key, colour in ((0, "one_fact_accuracy", ONE_FACT), (BAR + 1, "two_facts_accuracy", TWO_FACTS)):
        if way[key] is not None:
            yield from bar(accuracy, y + offset, way[key], colour, f"{way[key]:.1%}")
    label = f"{way['first_token_s'] * 1e3:,.0f} ms{'*' if _waits(way) else ''}"
    yield from bar(times, y + BAR / 2, way["first_token_s"], TIME, label)


def bar(panel: Panel, y: float, value: float, colour: str, label: str) -> Iterator[str]:
    """Returns the lines of one bar with its label behind it."""
    length = panel.length(value)
    yield f"<rect x='{panel.left:g}' y='{y:g}' width='{length:.1f}' height='{BAR}' fill='{colour}'/>"
    yield f"<text x='{panel.left + length + 6:.1f}' y='{y + BAR - 2:g}' fill='{FAINT}'>{escape(label)}</text>"
