from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cli.run_file import (
    STATE_DIR_VARIABLE,
    AlreadyRunning,
    RunRecord,
    claim_state_dir,
    is_claimed,
    read_record,
    write_record,
)

RECORD = RunRecord(
    os.getpid(), "127.0.0.1:1", ("127.0.0.1:2", "127.0.0.1:3"), "127.0.0.1:4", "127.0.0.1:5", ("127.0.0.1:6",)
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_record_comes_back_as_it_was_written_and_ends_with_the_claim(state: Path) -> None:
    with claim_state_dir():
        write_record(RECORD)
        assert read_record() == RECORD
        assert stat.S_IMODE((state / "run.json").stat().st_mode) == 0o600
    assert not (state / "run.json").exists()
    assert read_record() is None


def test_one_claim_at_a_time() -> None:
    with claim_state_dir():
        write_record(RECORD)
        with pytest.raises(AlreadyRunning), claim_state_dir():
            pass
        assert read_record() == RECORD, "a claim that failed took the record of the other one away"
    with claim_state_dir():
        assert is_claimed()
    assert not is_claimed()


def test_the_record_of_a_killed_supervisor_does_not_count(state: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with claim_state_dir():
            write_record(RECORD)
            os._exit(0)  # nothing is cleaned up, as by kill -9
    os.waitpid(pid, 0)
    # The process that it names is alive: it is this one. Only the lock tells.
    assert (state / "run.json").exists()
    assert read_record() is None
    with claim_state_dir():
        assert read_record() is None, "an old record counts while a new supervisor starts"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"pid": "x"}'])
def test_a_damaged_record_does_not_count(state: Path, text: str) -> None:
    with claim_state_dir():
        (state / "run.json").write_text(text)
        assert read_record() is None
