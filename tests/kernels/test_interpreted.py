"""Runs this folder's tests once more in a process that interprets Triton, and reports them file by file.

Knows no op. The interpreter is chosen when Triton is imported, hence a process of its own.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.conftest import INTERPRETING

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FILES = (
    "append_kv",
    "copy_pages",
    "decode_attention",
    "decode_plan",
    "decode_tokens",
    "fp8_pages",
    "gather_pages",
    "latents",
    "linear",
    "merge_attention_states",
    "mla_decode",
    "mla_extend",
    "mla_plans",
    "mla_prefill",
    "prefill_attention",
    "prefill_options",
    "prefill_work_list",
    "rotate_append_kv",
    "rows",
    "sinks",
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETING, reason="this is the interpreting process")]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElementTree.Element]:
    """The JUnit report of one interpreting run over all files."""
    path = tmp_path_factory.mktemp("interpreted") / "report.xml"
    paths = [str(HERE / f"test_{name}.py") for name in FILES]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            "interpreter",
            f"--junitxml={path}",
            *paths,
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert path.exists(), run.stdout + run.stderr
    yield ElementTree.parse(path).getroot()


@pytest.mark.parametrize("name", FILES)
def test_every_case_passes_in_the_interpreter(report: ElementTree.Element, name: str) -> None:
    cases = [case for case in report.iter("testcase") if case.get("classname", "").endswith(f"test_{name}")]
    assert cases
    bad = {case.get("name"): "".join(child.get("message", "") for child in case) for case in cases if len(case)}
    assert not bad
