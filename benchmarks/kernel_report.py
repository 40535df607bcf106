"""Puts the figures of kernels on an H200 into docs/kernels.md: tables between two markers.

python -m benchmarks.bench_gpu --only decode mla_decode ... --out benchmarks/results/gpu-h200-attention.json
python -m benchmarks.kernel_report
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.eval_report import ROOT, inserted, table_lines
from benchmarks.gpu_targets import target

RESULTS = ROOT / "benchmarks/results"
# The later a file, the newer: what an earlier one has of the same op and case is left out.
FILES = (
    "gpu-h200.json",
    "gpu-h200-decode.json",
    "gpu-h200-prefill.json",
    "gpu-h200-attention.json",
    "gpu-h200-latents.json",
)
DOCUMENT = ROOT / "docs/kernels.md"
BEGIN, END = "<!-- kernel figures -->\n", "<!-- end of kernel figures -->\n"
HEAD = ("op", "case", "figure", "us", "target", "of ceiling", "best peer")

Row = Mapping[str, Any]
Report = Mapping[str, Any]


def read_reports(folder: Path = RESULTS) -> list[Report]:
    """Returns the runs, the newest first, each with the rows that no newer one has."""
    reports: list[Report] = []
    newer: set[tuple[str, str]] = set()
    for name in reversed(FILES):
        report = json.loads((folder / name).read_text())
        rows = [row for row in report["rows"] if (row["op"], row["case"]) not in newer]
        newer |= {(row["op"], row["case"]) for row in rows}
        reports.append({**report, "name": name, "rows": rows})
    return reports


def block(reports: Sequence[Report]) -> str:
    """Markdown, markers included."""
    parts = [lines for report in reports for lines in (_about(report), table_lines(HEAD, _rows(report)))]
    beside = [lines for report in reports for lines in _beside(report["rows"])]
    return BEGIN + "\n\n".join("\n".join(lines) for lines in (*parts, *beside)) + "\n" + END


def _about(report: Report) -> list[str]:
    limits = report["ceilings"]
    versions = f"driver {report['driver']}, torch {report['torch']}, Triton {report['triton']}"
    return [
        f"One {report['device']} ({versions}), commit {report['commit'][:7]} (`{report['name']}`); ceilings of it:",
        f"copy {limits['copy_gb_per_s']:,.0f} GB/s, read {limits['read_gb_per_s']:,.0f} GB/s, bf16 GEMM "
        f"{limits['gemm_bf16_tflops']:,.0f} TFLOP/s.",
    ]


def _rows(report: Report) -> list[Sequence[str]]:
    return [_cells(row) for row in report["rows"] if row["figure"] is not None]


def _cells(row: Row) -> Sequence[str]:
    name, speed = best_peer(row)
    return (
        f"`{row['op']}`",
        row["case"],
        f"{row['figure']:,.0f} {row['unit']}",
        _time(row["microseconds"]),
        _aim(row),
        f"{row['of_ceiling']:.0%}" if row["of_ceiling"] else "",
        f"{name} {speed:,.0f}" if name else "",
    )


def _time(us: float) -> str:
    return f"{us:,.1f}" if us < 1000 else f"{us:,.0f}"


def _aim(row: Row) -> str:
    aim = target(row["op"], row["case"])
    if aim is None:
        return ""
    short = row["figure"] / aim - 1
    return f"{aim:,.0f}" + (f" (**{short:.1%}**)" if short < 0 else "")


def best_peer(row: Row) -> tuple[str, float]:
    """Returns the name and figure of the fastest peer that was timed; "" and 0 without one."""
    timed = speeds(row)
    name = max(timed, key=lambda peer: timed[peer], default="")
    return name, timed.get(name, 0.0)


def speeds(row: Row) -> dict[str, float]:
    """Returns the figures of those peers that ran; the others have a complaint in place of one."""
    return {name: speed for name, speed in row["peers"].items() if isinstance(speed, float)}


def _beside(rows: Iterable[Row]) -> Iterable[list[str]]:
    """A table for each op that was timed beside at least two peers: each peer's figure, the best of a row in bold."""
    for op, group in groupby(rows, key=lambda row: row["op"]):
        timed = [row for row in group if speeds(row)]
        names = list(dict.fromkeys(name for row in timed for name in speeds(row)))
        if len(names) > 1:
            unit = timed[0]["unit"]
            head = (f"`{op}`, {unit}", "here", *names)
            yield table_lines(head, [_side_by_side(row, names) for row in timed])


def _side_by_side(row: Row, names: Sequence[str]) -> Sequence[str]:
    all_of = {"": row["figure"], **speeds(row)}
    best = max(all_of.values())
    figures = [all_of.get(name) for name in ("", *names)]
    return (row["case"], *("" if f is None else f"**{f:,.0f}**" if f == best else f"{f:,.0f}" for f in figures))


def main() -> None:
    DOCUMENT.write_text(inserted(DOCUMENT.read_text(), block(read_reports()), BEGIN, END))


if __name__ == "__main__":
    main()
