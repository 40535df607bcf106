"""Times how long a checkpoint's tensors take to the device, through pinned buffers and one by one from the mapping.

    python -m benchmarks.bench_load --device cuda [--gigabytes 8] [--folder F] [--out FILE]

Writes random tensors in four files, reads them once so that they are in the page cache, then loads them in turns by
both ways. The tensors of both ways must have the same bytes, or there are no figures.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.host import about_host, commit, gpu, versions
from benchmarks.report import parser, save
from worker_service.model.weight_copies import WeightCopies

NUM_FILES = 4
ROWS, COLUMNS = 14336, 4096
SMALL = 4096
Copy = Callable[[torch.Tensor], torch.Tensor]


def write_files(folder: Path, num_bytes: int) -> int:
    """Matrices of an 8B model's size, each with a vector beside it. Returns the bytes."""
    per_file = max(num_bytes // NUM_FILES // (2 * ROWS * COLUMNS), 1)
    for file in range(NUM_FILES):
        draw = torch.Generator().manual_seed(file)
        tensors = {}
        for number in range(per_file):
            matrix = torch.randint(-(2**15), 2**15, (ROWS, COLUMNS), dtype=torch.int16, generator=draw)
            tensors[f"{number}.matrix"] = matrix.view(torch.bfloat16)
            tensors[f"{number}.vector"] = matrix[0, :SMALL].clone().view(torch.bfloat16)
        save_file(tensors, folder / f"{file}.safetensors")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def stored_tensors(folder: Path) -> Iterator[torch.Tensor]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield file.get_tensor(name)


def timed(folder: Path, copy: Copy, device: torch.device) -> tuple[float, int]:
    """Returns the seconds to the last byte on the device, and a sum over all of them."""
    start_s = time.perf_counter()
    made = [copy(tensor) for tensor in stored_tensors(folder)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start_s
    return seconds, sum(int(tensor.view(torch.int16).sum(dtype=torch.int64)) for tensor in made)


def measured(folder: Path, device: torch.device, num_bytes: int, rounds: int) -> list[dict[str, Any]]:
    copies = WeightCopies(device)
    ways: dict[str, Copy] = {
        "pinned_buffers": copies.through_buffers,
        "one_by_one": lambda tensor: tensor.to(device, copy=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    sums = set()
    for _ in range(rounds + 1):
        for name, copy in ways.items():
            took_s, total = timed(folder, copy, device)
            seconds[name].append(took_s)
            sums.add(total)
    if len(sums) != 1:
        raise SystemExit("the bytes that arrived differ")
    return [
        {
            "name": name,
            "seconds": round(median(values[1:]), 3),
            "gb_per_s": round(num_bytes / median(values[1:]) / 1e9, 2),
        }
        for name, values in seconds.items()
    ]


def main() -> None:
    told = parser(__doc__, rounds=3)
    told.add_argument("--device", default="cuda")
    told.add_argument("--gigabytes", type=float, default=8.0)
    told.add_argument("--folder", type=Path, help="for the files; default: the temporary folder")
    told.add_argument("--out", type=Path)
    options = told.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        num_bytes = write_files(Path(name), int(options.gigabytes * 1e9))
        rows = measured(Path(name), device, num_bytes, options.rounds)
    machine = {**about_host(), **(gpu() if device.type == "cuda" else {}), **versions(), "commit": commit()}
    save({"machine": machine, "bytes": num_bytes, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
