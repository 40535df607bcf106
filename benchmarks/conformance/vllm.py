"""vLLM's CPU engine under the scenes: full attention, windows, recurrent states, and full attention over two ranks.

    python -m benchmarks.conformance.vllm PYTHON FOLDER

`PYTHON` has vLLM and this project's client installed; small models are made in `FOLDER`. The connector's configuration
is the one that the README gives, with addresses of the run's own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.conformance.__main__ import main as run_scenes

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks/results/conformance-vllm.json"


class Case(NamedTuple):
    """A model of tiny_models, and what its engine is started with beside OPTIONS."""

    model: str
    options: str = ""
    environment: Mapping[str, str] = {}


CASES = {
    "full": Case("full"),
    "windows": Case("windows"),
    # With several of this model's requests in a batch vLLM's CPU engine answers otherwise than with one, also without a
    # connector.
    "states": Case("states", "--max-num-seqs 1"),
    # vLLM would give each rank the cores of a NUMA node of its own.
    "full, two ranks": Case("full", "--tensor-parallel-size 2", {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}),
}
NUM_BLOCKS = 48
PAGE_TOKENS = 32  # the CPU engine takes multiples of 32
METRIC = "vllm:external_prefix_cache_hits_total"
# Two cores: one thread, a small cache, no compiling. The reset of vLLM's own cache is an endpoint for developers.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}
OPTIONS = (
    "--dtype float32 --max-model-len 1024 --enforce-eager --max-num-seqs 4 --max-num-batched-tokens 256 --seed 0"
    # Four long answers find no room together.
    f" --num-gpu-blocks-override {NUM_BLOCKS}"
    f" --block-size {PAGE_TOKENS} --host 127.0.0.1 --port {{port}} --served-model-name tiny"
)
_CONFIG = re.compile(r"--kv-transfer-config '(\{.*?\})'$", re.DOTALL | re.MULTILINE)


def readme_config() -> dict[str, Any]:
    """What the README tells people to give vLLM."""
    found = _CONFIG.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found is not None
    config: dict[str, Any] = json.loads(found[1])
    return config


def command(python: str, folder: Path, case: Case) -> list[str]:
    """An engine's command line, with placeholders for its port and the services."""
    config = readme_config()
    # A slow machine must not turn an answer into a miss.
    patient = {"call_timeout_s": 20.0, "store_timeout_s": 20.0, "transfer_timeout_s": 20.0}
    config["kv_connector_extra_config"] = {"cache": "{cache}", "redis": "{redis}", **patient}
    environment = [f"{name}={value}" for name, value in {**ENVIRONMENT, **case.environment}.items()]
    server = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / case.model)]
    options = [*OPTIONS.split(), *case.options.split()]
    return ["env", *environment, *server, *options, "--kv-transfer-config", json.dumps(config)]


def main() -> int:
    python, folder = sys.argv[1], Path(sys.argv[2])
    make = [python, "-m", "benchmarks.conformance.tiny_models", str(folder)]
    subprocess.run(make, check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    version = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    failed = 0
    for name, case in CASES.items():
        scenes = ["--name", f"vllm-cpu {version}, {name}", "--model", "tiny", "--page-tokens", str(PAGE_TOKENS)]
        scenes += ["--reset", "/reset_prefix_cache", "--metric", METRIC, "--out", str(RESULT), "--"]
        failed += run_scenes([*scenes, *command(python, folder, case)])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
