"""The record of a running `stemcache up`: where its services are. Other commands read it when no address is given.

Knows no service; a file in the state folder, readable by its owner only.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

STATE_DIR_VARIABLE = "STEMCACHE_STATE_DIR"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Addresses are host:port; `pid` is the supervisor's."""

    pid: int
    cache: str
    workers: tuple[str, ...]
    cache_metrics: str = ""


def state_dir() -> Path:
    """STEMCACHE_STATE_DIR, else .stemcache in the current folder."""
    return Path(os.environ.get(STATE_DIR_VARIABLE, ".stemcache"))


def write_record(record: RunRecord) -> None:
    path = state_dir() / "run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        json.dump(asdict(record), out)


def read_record() -> RunRecord | None:
    """The record of a supervisor that still lives, else None."""
    try:
        raw = json.loads((state_dir() / "run.json").read_text())
        record = RunRecord(
            int(raw["pid"]), str(raw["cache"]), tuple(map(str, raw["workers"])), str(raw["cache_metrics"])
        )
        os.kill(record.pid, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record


def remove_record() -> None:
    (state_dir() / "run.json").unlink(missing_ok=True)
