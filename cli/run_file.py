"""The record of a running `stemcache up`: where its services are. Other commands read it when no address is given.

Files in the state folder, readable by their owner only. A lock, which ends with its process, says whether the record
counts: a process id may belong to somebody else by now.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

STATE_DIR_VARIABLE = "STEMCACHE_STATE_DIR"
CLAIM_TRIES = 20


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Addresses are host:port; `pid` is the supervisor's."""

    pid: int
    cache: str
    workers: tuple[str, ...]
    cache_metrics: str = ""
    cache_admin: str = ""
    worker_admins: tuple[str, ...] = ()


class AlreadyRunning(Exception):
    """Another process has claimed the state folder."""


def state_dir() -> Path:
    """Returns STEMCACHE_STATE_DIR, else .stemcache in the current folder."""
    return Path(os.environ.get(STATE_DIR_VARIABLE, ".stemcache"))


@contextmanager
def claim_state_dir() -> Iterator[None]:
    """Claims the state folder for this `stemcache up`. Raises AlreadyRunning."""
    path = _lock_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(descriptor)
        remove_record()  # of one that was killed
        try:
            yield
        finally:
            remove_record()
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Takes the lock; tries again for a moment, as a reader of the record holds it for a moment."""
    for _ in range(CLAIM_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return
    raise AlreadyRunning


def is_claimed() -> bool:
    """Returns whether a process has claimed the state folder; it may still be starting its services."""
    try:
        descriptor = os.open(_lock_path(), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def write_record(record: RunRecord) -> None:
    """Writes the record whole or not at all: it may be read at any moment."""
    path = _record_path()
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        json.dump(asdict(record), out)
    fresh.replace(path)


def read_record() -> RunRecord | None:
    """Returns the record of a supervisor that still runs, else None."""
    record = _parse_record()
    return record if record is not None and is_claimed() else None


def remove_record() -> None:
    _record_path().unlink(missing_ok=True)


def _parse_record() -> RunRecord | None:
    try:
        raw = json.loads(_record_path().read_text())
        workers, admins = (tuple(map(str, raw[name])) for name in ("workers", "worker_admins"))
        cache = (str(raw["cache"]), workers, str(raw["cache_metrics"]), str(raw["cache_admin"]))
        return RunRecord(int(raw["pid"]), *cache, admins)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _record_path() -> Path:
    return state_dir() / "run.json"


def _lock_path() -> Path:
    return state_dir() / "run.lock"
