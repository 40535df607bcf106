"""Runs this folder's tests once more in processes that interpret Triton, and reports them file by file.

The interpreter is chosen when Triton is imported, hence processes of their own: one for each part, and parts of about
as long, so that two of them may run side by side.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.examples import LEFT_TO_THOROUGH, THOROUGH
from tests.kernels.conftest import INTERPRETING

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PARTS = (
    (
        "mla_extend",
        "mla_device_plan",
        "mla_plans",
        "mla_prefill",
        "linear",
        "linear_fp32",
        "copy_pages",
        "rows",
        "gated_activation",
        "gates",
        "softcap_logits",
        "interpreter",
        "causal_conv",
        "copy_states",
        "head_linear",
        "rotate_append_kv",
        "rotate_append_latent",
        "rotate_append_index",
        "index_logits",
        "top_k",
        "sparse_latents",
        "compressed_attention",
        "compress_tokens",
        "rotate_tail",
        "rotate_append_tail",
        "mix_streams",
        "fp8_pages",
        "append_kv",
        "sinks",
        "scan_plan",
        "gated_delta_scan",
    ),
    (
        "mamba2_scan",
        "state_update",
        "mla_decode",
        "mla_decode_by_load",
        "mla_fold",
        "latents",
        "gather_pages",
        "prefill_work_list",
        "benchmark_gate",
        "sample_tokens",
        "route_experts",
        "grouped_linear",
        "grouped_linear_stored",
        "combine_experts",
        "prefill_attention",
        "prefill_options",
        "decode_attention",
        "decode_plan",
        "decode_window_plan",
        "decode_tokens",
        "merge_attention_states",
    ),
)
PART_SECONDS = 3000 if THOROUGH else 900

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(PART_SECONDS),
    pytest.mark.skipif(INTERPRETING, reason="this is the interpreting process"),
]

Report = Callable[[int], ElementTree.Element]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The JUnit report of one interpreting run over a part's files; each part runs once."""
    return cache(lambda part: interpreted(PARTS[part], tmp_path_factory.mktemp("interpreted") / "report.xml"))


def interpreted(names: tuple[str, ...], path: Path) -> ElementTree.Element:
    paths = [str(HERE / f"test_{name}.py") for name in names]
    options = ["-q", "-p", "no:cacheprovider", "-k", "interpreter", f"--junitxml={path}"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *paths],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PART_SECONDS,
        check=False,
    )
    assert path.exists(), run.stdout + run.stderr
    return ElementTree.parse(path).getroot()


@pytest.mark.parametrize(
    ("part", "name"),
    [
        pytest.param(part, name, id=name, marks=pytest.mark.xdist_group(f"interpreted-{part}"))
        for part, names in enumerate(PARTS)
        for name in names
    ],
)
def test_every_case_passes_in_the_interpreter(report: Report, part: int, name: str) -> None:
    cases = [case for case in report(part).iter("testcase") if case.get("classname", "").endswith(f"test_{name}")]
    assert any(not len(case) for case in cases)
    bad = {case.get("name"): "".join(child.get("message", "") for child in case) for case in cases if len(case)}
    assert not {name: why for name, why in bad.items() if why != LEFT_TO_THOROUGH}
