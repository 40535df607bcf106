"""Which model a command serves: the one it is given, else one in the box; `random` has seeded random weights."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version
from pathlib import Path

from cli.output import Output
from cli.run_file import state_dir
from register_qa import HYBRID_FOLDER, MODEL_FOLDER

RANDOM = "random"
HYBRID = "hybrid"


def model_to_serve(given: str, seed: int, output: Output) -> str:
    """Returns a folder or a hub id. `random` is made when it is first asked for."""
    if given == HYBRID:
        return str(HYBRID_FOLDER)
    if given != RANDOM:
        return given or str(MODEL_FOLDER)
    folder = _random_folder(seed)
    if not folder.exists():
        with output.working("making a small model of random weights"):
            _make(folder, seed)
    return str(folder)


def model_name(given: str) -> str:
    """Returns its name for people."""
    return given or "the one in the box"


def _random_folder(seed: int) -> Path:
    """Returns the folder's path. It has our version in it, as another one may make another model of the same seed."""
    return state_dir() / "models" / f"random-{version('stemcache')}-{seed}"


def _make(folder: Path, seed: int) -> None:
    """Makes the model whole or not at all: Ctrl-C may come, and another process may be making it too."""
    from cli.random_model import make_random_model

    fresh = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        make_random_model(fresh, seed)
        if not folder.exists():
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
