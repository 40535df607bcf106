"""What the command says where its packages are not installed, as beside an engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

# As the script that pip writes, where one package is missing.
SCRIPT = "import sys; sys.modules[{!r}] = None; from cli.__main__ import main; sys.exit(main())"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(package: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(package)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: the command needs {package}: pip install 'stemcache[cli]'\n"


def test_another_missing_module_is_a_fault_of_ours() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format("cli.ask")], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" in done.stderr
