"""Puts an evaluation into the README: the table between two markers, and its plot beside the documents.

    stemcache eval --questions 200 --registers 20 --json > benchmarks/results/eval-cpu.json
    python -m benchmarks.eval_report

and one sentence on a run with `--device cuda`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cli.evaluation.plot import eval_plot

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "benchmarks/results/eval-cpu.json"
ON_H200 = ROOT / "benchmarks/results/eval-h200.json"
README = ROOT / "README.md"
PLOT = ROOT / "docs/eval-cpu.svg"
BEGIN, END = "<!-- eval -->\n", "<!-- end of eval -->\n"
TOLD_ELSEWHERE = {"cold": "cold", "device": "cached on the device", "fetched": "fetched"}
HEAD = ("the prefix is", "one fact", "two facts", "cached", "fetched", "computed", "hits", "TTFT", "same text")


def readme_block(report: Mapping[str, Any], on_h200: Mapping[str, Any]) -> str:
    """Markdown, markers included."""
    lines = [_what(report), "", *table_lines(HEAD, [_cells(way) for way in report["ways"]])]
    plot = f"![Accuracy and time to the first token, by the way the prefix was obtained]({PLOT.relative_to(ROOT)})"
    return BEGIN + "\n".join([*lines, "", _proof(report), "", _elsewhere("an H200", on_h200), "", plot]) + "\n" + END


def _what(report: Mapping[str, Any]) -> str:
    sizes = report["register_tokens"]
    device = f"{report['cpus']} CPU cores" if report["device"] == "cpu" else report["device"]
    return (
        f"{report['questions']} questions over {report['registers']} held-out registers of {min(sizes):,} to "
        f"{max(sizes):,} tokens, {report['ways'][0]['prompt']:,} prompt tokens in each row, {report['dtype']} on "
        f"{device}; one run, {report['took_s'] / 60:.0f} minutes:"
    )


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _cells(way: Mapping[str, Any]) -> list[str]:
    tokens = [f"{way[key]:,}" for key in ("cached", "fetched", "computed")]
    hits = f"{way['hit_share']:.1%}" if way["warm"] else ""
    same = "yes" if way["same_text"] == way["questions"] else f"{way['same_text']} of {way['questions']}"
    marks = [_percent(way["one_fact_accuracy"]), _percent(way["two_facts_accuracy"])]
    return [way["title"], *marks, *tokens, hits, f"{way['first_token_s'] * 1e3:,.0f} ms", same]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _proof(report: Mapping[str, Any]) -> str:
    said = [f"{what}: {count:,}" for way in report["ways"] for what, count in way["proof"].items()]
    return f"What shows that the rows are what they say: {'; '.join(said)}."


def _elsewhere(where: str, report: Mapping[str, Any]) -> str:
    ways = {way["way"]: way for way in report["ways"]}
    least = [min(way[key] for way in ways.values()) for key in ("one_fact_accuracy", "two_facts_accuracy")]
    same = all(way["same_text"] == way["questions"] for way in ways.values())
    times = ", ".join(f"{ways[way]['first_token_s'] * 1e3:.0f} ms {said}" for way, said in TOLD_ELSEWHERE.items())
    return (
        f"On {where} in {report['dtype']}, {report['questions']} questions over {report['registers']} registers: "
        f"{least[0]:.1%} (one fact) and {least[1]:.1%} (two facts) right in the row with the fewest, "
        f"{'every text is' if same else 'NOT every text is'} the cold run's; first token after {times}."
    )


def inserted(document: str, block: str, first: str = BEGIN, last: str = END) -> str:
    """Returns the document with this block in the place of the one that it has between these markers."""
    before, begin, rest = document.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the document has no {first.strip()} and {last.strip()}")
    return before + block + after


def main() -> None:
    report = json.loads(REPORT.read_text())
    README.write_text(inserted(README.read_text(), readme_block(report, json.loads(ON_H200.read_text()))))
    PLOT.write_text(eval_plot(report))


if __name__ == "__main__":
    main()
