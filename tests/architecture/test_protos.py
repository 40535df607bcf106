"""buf finds what it is there to find: bad style, and changes that would break a peer of an earlier version."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

BUF = Path(sys.executable).parent / "buf"


def buf(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUF, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The protos alone, to be changed at will."""
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    (tmp_path / "protos/v1").mkdir(parents=True)
    for proto in (ROOT / "protos/v1").glob("*.proto"):
        shutil.copy(proto, tmp_path / "protos/v1")
    return tmp_path


def test_the_protos_are_clean(copy: Path) -> None:
    assert buf(copy, "lint").returncode == 0


@pytest.mark.parametrize(
    ("file", "old", "new", "breaks"),
    [
        ("cache.proto", "uint64 step_id = 1;\n  repeated Ack", "uint64 step_id = 9;\n  repeated Ack", True),
        ("worker.proto", "  string salt = 4;\n", "", True),
        ("worker.proto", "  rpc Describe(DescribeRequest) returns (DescribeResponse);\n", "", True),
        ("types.proto", "uint32 window_tokens = 3;", "string window_tokens = 3;", True),
        ("worker.proto", "  string salt = 4;\n", "  string salt = 4;\n  string note = 99;\n", False),
    ],
)
def test_changes_that_break_a_peer_are_told(copy: Path, file: str, old: str, new: str, breaks: bool) -> None:
    path = copy / "protos/v1" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    assert (buf(copy, "breaking", "--against", str(ROOT)).returncode != 0) == breaks
