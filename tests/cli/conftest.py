"""One running `stemcache up` for the tests that only ask it or kill its children; each time it comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.command import Running, one_object


class Service(NamedTuple):
    state: Path
    running: Running
    report: dict[str, Any]

    @property
    def cache(self) -> str:
        return str(self.report["cache"])

    def worker(self, name: str) -> str:
        return str(self.report["workers"][name])


def start_service(folder: Path, *options: str, **variables: str) -> Service:
    """`stemcache up --json` on free ports, serving: random weights, and a token for each byte of a prompt."""
    state = folder / "state"
    fixed = ("--cache-port", "0", "--worker-port", "0", "--model", "random")
    running = Running(folder, state, "up", "--json", *fixed, *options, **variables)
    try:
        running.wait_for_stdout("\n")
    except BaseException:
        running.end()
        raise
    return Service(state, running, one_object(running.out.read_text()))


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = start_service(tmp_path_factory.mktemp("service"))
    yield made
    made.running.end()
