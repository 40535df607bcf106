"""What figures were taken on: the machine, its GPU, the versions and the commit. Imports no PyTorch."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("grpcio", "protobuf", "torch", "triton", "uvloop")


def said_by(*command: str) -> str:
    """Returns the first line that a command prints, "unknown" where it cannot run."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return output.strip().partition("\n")[0]


def commit() -> str:
    """Returns the checkout's commit. A copy of the sources without their history is told which one it is."""
    return os.environ.get("STEMCACHE_COMMIT") or said_by("git", "rev-parse", "--short", "HEAD")


def gpu() -> dict[str, str]:
    """Returns the first GPU's name and driver."""
    return {
        "gpu": said_by("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "driver": said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def short_name(gpu_name: str) -> str:
    """Returns h200 for "NVIDIA H200"."""
    return gpu_name.lower().removeprefix("nvidia ").replace(" ", "-")


def on_this_machine() -> dict[str, object]:
    """Returns the processor that figures were taken on, and what else it had to do."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    found = {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}
    return {"load_average": round(os.getloadavg()[0], 1), "machine": found}


def about_host() -> dict[str, object]:
    return {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()}


def versions() -> dict[str, str]:
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
