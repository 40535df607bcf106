from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cli.run_file import STATE_DIR_VARIABLE, RunRecord, read_record, remove_record, write_record


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_record_comes_back_as_it_was_written(state: Path) -> None:
    record = RunRecord(os.getpid(), "127.0.0.1:1", ("127.0.0.1:2", "127.0.0.1:3"), "127.0.0.1:4")
    write_record(record)
    assert read_record() == record
    assert stat.S_IMODE((state / "run.json").stat().st_mode) == 0o600
    remove_record()
    assert read_record() is None


def test_the_record_of_a_dead_supervisor_does_not_count() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    write_record(RunRecord(pid, "127.0.0.1:1", ()))
    assert read_record() is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"pid": "x"}'])
def test_a_damaged_record_does_not_count(state: Path, text: str) -> None:
    state.mkdir()
    (state / "run.json").write_text(text)
    assert read_record() is None
