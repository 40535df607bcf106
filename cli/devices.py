"""Which GPU each worker gets, and how much of it: several workers may have to share one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ASK_TIMEOUT_S = 120.0
# What workers leave free for activations and for the driver, together.
MEMORY_SHARE = 0.9


def count_gpus(device: str) -> int:
    """Returns the number of CUDA devices that workers may use. Imports nothing where there is no sign of a driver."""
    if device == "cpu" or (device == "auto" and not _has_driver()):
        return 0
    # In a process of its own, so that the supervisor never holds a CUDA context.
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        asked = subprocess.run(  # noqa: S603 - our own interpreter and text
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
        )
        return int(asked.stdout)
    except (subprocess.SubprocessError, OSError, ValueError):
        return 0


def placements(num_workers: int, num_gpus: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns variables for each worker: its GPU in turn, and an equal share of the memory that is free there."""
    if not num_gpus:
        return [{} for _ in range(num_workers)]
    names = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(names) < num_gpus or not names[0]:
        names = [str(number) for number in range(num_gpus)]
    return [
        _placement(names[at % num_gpus], _sharers(at % num_gpus, num_workers, num_gpus)) for at in range(num_workers)
    ]


def _placement(gpu: str, sharers: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": gpu, "STEMCACHE_WORKER_MEMORY_FRACTION": f"{MEMORY_SHARE / sharers:.3f}"}


def _sharers(gpu: int, num_workers: int, num_gpus: int) -> int:
    return len(range(gpu, num_workers, num_gpus))


def has_gpu() -> bool:
    """Returns whether a driver shows a GPU, and no variable hides it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and (any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists())


def _has_driver() -> bool:
    return has_gpu() or "CUDA_VISIBLE_DEVICES" in os.environ
