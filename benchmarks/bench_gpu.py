"""Times every kernel op on a CUDA device beside its peers, the card's own ceilings and the figures it is to reach.

An op is timed only after its result on the very same inputs agreed with its reference; one that does not agree gets no
figure, and the exit code is 1. A target that is missed is shown, and no failure.

    python -m benchmarks.bench_gpu [--only decode ...] [--out benchmarks/results/gpu-h200.json]

The last area, "model", runs launches of a whole 8B-shaped model (bench_llama_gpu), in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.table import Table

from benchmarks import (
    gpu_attention,
    gpu_compressed,
    gpu_compressed_rows,
    gpu_experts,
    gpu_mla,
    gpu_mla_decode,
    gpu_mla_layers,
    gpu_moves,
    gpu_ops,
    gpu_sparse,
    gpu_states,
)
from benchmarks.gpu_targets import target
from benchmarks.gpu_timer import Timer, ceilings
from benchmarks.host import commit, gpu, short_name
from benchmarks.measurement import Measurement, Work
from benchmarks.report import RESULTS, save, write

AREAS = {
    **gpu_attention.AREAS,
    **gpu_mla.AREAS,
    **gpu_mla_decode.AREAS,
    **gpu_mla_layers.AREAS,
    **gpu_ops.AREAS,
    **gpu_moves.AREAS,
    **gpu_experts.AREAS,
    **gpu_states.AREAS,
    **gpu_sparse.AREAS,
    **gpu_compressed.AREAS,
    **gpu_compressed_rows.AREAS,
}

MODEL = "model"

# The microseconds of a call of each, or the complaint of one that cannot run.
Clock = Callable[[Sequence[Work]], list[float | str]]


@dataclass(slots=True)
class Row:
    """A measurement's outcome: no figure where the check failed, a peer's complaint where it cannot run."""

    op: str
    case: str
    unit: str
    error: float
    tolerance: float
    microseconds: float | None = None
    figure: float | None = None
    target: float | None = None
    of_ceiling: float | None = None
    of_best_peer: float | None = None
    peers: dict[str, float | str] = field(default_factory=dict)


def measure(measurement: Measurement, clock: Clock, limits: dict[str, float] | None = None) -> Row:
    """Checks, then times the op beside its peers. Raises RuntimeError if the op itself cannot be timed."""
    error = measurement.error()
    row = Row(measurement.op, measurement.case, measurement.ceiling.unit, error, measurement.tolerance)
    row.target = target(row.op, row.case)
    if not error <= measurement.tolerance:
        return row
    micros, *others = times_us(measurement, clock)
    if isinstance(micros, str):
        raise RuntimeError(f"{row.op} {row.case}: {micros}")
    figure = measurement.amount / micros * 1e6
    for peer, time in zip(measurement.peers, others, strict=True):
        row.peers[peer.name] = time if isinstance(time, str) else round(peer.amount / time * 1e6, 1)
    row.microseconds, row.figure = round(micros, 2), round(figure, 1)
    ceiling = (limits or {}).get(measurement.ceiling.name)
    row.of_ceiling = round(figure / ceiling, 3) if ceiling else None
    best = max((speed for speed in row.peers.values() if isinstance(speed, float)), default=0.0)
    row.of_best_peer = round(figure / best, 3) if best else None
    return row


def times_us(measurement: Measurement, clock: Clock) -> list[float | str]:
    """Returns those of the op and of its peers, without what they do besides."""
    works = [measurement.run, *(peer.run for peer in measurement.peers)]
    if measurement.beside is None:
        return clock(works)
    *times, beside = clock([*works, measurement.beside])
    if isinstance(beside, str):
        raise RuntimeError(f"{measurement.op} {measurement.case}, what is beside it: {beside}")
    return [time if isinstance(time, str) else time - beside for time in times]


def measured(area: str, timer: Timer, limits: dict[str, float]) -> Iterator[Row]:
    for make in AREAS[area]:
        for measurement in make():
            yield measure(measurement, timer.side_by_side, limits)


def about_device() -> dict[str, str | None]:
    """What the figures were taken on, and with which commit; "unknown" outside a checkout."""
    return {
        "commit": commit(),
        "device": torch.cuda.get_device_name(),
        "driver": gpu()["driver"],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


def result_path() -> Path:
    """results/gpu-h200.json for an "NVIDIA H200"."""
    return RESULTS / f"gpu-{short_name(torch.cuda.get_device_name())}.json"


def shown(rows: Iterable[Row]) -> Table:
    table = Table("op", "case", "figure", "unit", "us", "target", "of ceiling", "best peer", "of it")
    for row in rows:
        speeds = {name: speed for name, speed in row.peers.items() if isinstance(speed, float)}
        best = max(speeds, key=lambda name: speeds[name], default="")
        table.add_row(
            row.op,
            row.case,
            "WRONG" if row.figure is None else f"{row.figure:,.0f}",
            row.unit,
            "" if row.microseconds is None else f"{row.microseconds:,.1f}",
            "" if row.target is None else f"{row.target:,.0f}{'' if (row.figure or 0) >= row.target else ' missed'}",
            "" if row.of_ceiling is None else f"{row.of_ceiling:.0%}",
            f"{best} {speeds[best]:,.0f}" if best else "",
            "" if row.of_best_peer is None else f"{row.of_best_peer:.2f}",
        )
    return table


def model_figures() -> dict[str, object]:
    """What bench_llama_gpu reports, for every kind of invariance."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model.json"
        command = ["-m", "benchmarks.bench_llama_gpu", "--out", str(out)]
        subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
        report: dict[str, object] = json.loads(out.read_text())
    return {name: value for name, value in report.items() if isinstance(value, dict)}


def run(areas: Sequence[str], out: Path) -> tuple[dict[str, object], list[Row]]:
    """Returns the report and its rows; it is in `out` after each area already, with the areas that it lacks."""
    timer = Timer()
    limits = ceilings(timer)
    rows: list[Row] = []
    report: dict[str, object] = {**about_device(), "ceilings": limits, "rows": []}
    for nth, area in enumerate(areas):
        for row in measured(area, timer, limits):
            rows.append(row)
            print(f"{row.op} {row.case}: {row.figure} {row.unit}", file=sys.stderr, flush=True)
        report["rows"] = [asdict(row) for row in rows]
        write({**report, "lacks": areas[nth + 1 :]}, out)
    return report, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=sorted((*AREAS, MODEL)), default=[*AREAS, MODEL])
    parser.add_argument("--out", type=Path, help="default: results/gpu-<device>.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_gpu needs a CUDA device")
    out = arguments.out or result_path()
    report, rows = run([area for area in arguments.only if area != MODEL], out)
    if MODEL in arguments.only:
        torch.cuda.empty_cache()
        report["model"] = model_figures()
    save(report, out)
    Console(width=180).print(shown(rows))
    sys.exit(0 if all(row.figure is not None for row in rows) else 1)


if __name__ == "__main__":
    main()
