"""The committed stubs are those of the committed protos."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.architecture.sources import ROOT

PLUGINS = ("--python_out", "--grpc_python_out", "--mypy_out", "--mypy_grpc_out")


def test_the_stubs_are_fresh(tmp_path: Path) -> None:
    protos = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos/v1").glob("*.proto"))
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *(f"{plugin}={tmp_path}" for plugin in PLUGINS), *protos],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"},
        check=True,
        timeout=120,
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / "protos/v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "protos/v1").glob("*_pb2*")}
    assert sorted(fresh) == sorted(committed)
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, f"run `make protos`: {stale}"
