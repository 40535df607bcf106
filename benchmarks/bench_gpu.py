"""Times every kernel op on a CUDA device beside what torch offers for the same work.

Knows no service. An op is timed only after its result on the very same inputs agreed with its reference; one that does
not agree gets no figure, and the exit code is 1.

    python -m benchmarks.bench_gpu [--only decode] [--out benchmarks/results/gpu.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks import gpu_moves, gpu_ops
from benchmarks.gpu_ops import Measurement
from benchmarks.gpu_timer import Timer, ceilings

RESULT = Path(__file__).parent / "results" / "gpu.json"
AREAS = {**gpu_ops.AREAS, **gpu_moves.AREAS}

Clock = Callable[[Callable[[], object]], float]


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
    peers: dict[str, float | str] = field(default_factory=dict)


def measure(measurement: Measurement, clock: Clock) -> Row:
    """Checks, then times the op and its peers; `clock` gives the microseconds of a call."""
    error = measurement.error()
    row = Row(measurement.op, measurement.case, measurement.unit, error, measurement.tolerance)
    if not error <= measurement.tolerance:
        return row
    micros = clock(measurement.run)
    row.microseconds, row.figure = round(micros, 2), round(measurement.amount / micros * 1e6, 1)
    for peer in measurement.peers:
        try:
            row.peers[peer.name] = round(peer.amount / clock(peer.run) * 1e6, 1)
        except RuntimeError as failure:
            row.peers[peer.name] = str(failure).partition("\n")[0]
    return row


def run(only: str | None) -> tuple[dict[str, object], bool]:
    """The report, and whether every check passed."""
    timer = Timer()
    limits = ceilings(timer)
    rows: list[Row] = []
    for area, makers in AREAS.items():
        if only not in (None, area):
            continue
        for make in makers:
            rows += [measure(measurement, timer.microseconds) for measurement in make()]
            print(json.dumps(asdict(rows[-1])), file=sys.stderr, flush=True)
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "ceilings": limits,
        "rows": [asdict(row) for row in rows],
    }
    return report, all(row.figure is not None for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", choices=sorted(AREAS))
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_gpu needs a CUDA device")
    report, passed = run(arguments.only)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
