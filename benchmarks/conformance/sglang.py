"""SGLang's server on a CPU under the scenes, with models of full attention, with windows, and with recurrent states.

    python -m benchmarks.conformance.sglang PYTHON FOLDER STUBS [MODEL ...]

`PYTHON` has SGLang and this project's client installed; small models are made in `FOLDER`. `STUBS` has the one module
of vLLM that SGLang asks for where it has no kernels of its own. The linker's options are those of the README, with
addresses of the run's own.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.conformance.__main__ import main as run_scenes

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks/results/conformance-sglang.json"
METRIC = 'sglang:cached_tokens_total{cache_source="host"'
# Tokens of the device's pools.
POOL_TOKENS = 1536
# States are kept at page boundaries by GPUs alone; on a CPU at the end of each request, with pages of one token.
PAGE_TOKENS = {"full": 32, "windows": 32, "states": 1}
TAILS = {"states": "more"}
# Forces a retraction at a fixed interval of steps: SGLang admits only what fits and would never preempt by itself here.
RETRACT = ("SGLANG_TEST_RETRACT=1", "SGLANG_TEST_RETRACT_INTERVAL=40")
# Its Triton kernels for states run in Triton's interpreter. With requests taken back, SGLang 0.5.23 gives other tokens
# for this model without any linker too (1 of 16 answers, at its 91st token).
ENVIRONMENT = {"full": RETRACT, "windows": RETRACT, "states": ("TRITON_INTERPRET=1",)}
OPTIONS = (
    "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --grammar-backend none"
    " --disable-overlap-schedule --disable-cuda-graph --mem-fraction-static 0.3 --max-running-requests 4"
    f" --max-total-tokens {POOL_TOKENS} --random-seed 0"
    " --enable-metrics --log-level warning --skip-server-warmup"
    " --host 127.0.0.1 --port {port} --served-model-name tiny"
)


def readme_options() -> list[str]:
    """What the README tells people to give SGLang for the linker."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Under SGLang")[1]
    words = shlex.split(section.split("```")[1].replace("\\\n", " "), comments=True)
    return words[words.index("--enable-unified-cache-external-linker") :]


def command(python: str, stubs: Path, model: Path) -> list[str]:
    """An engine's command line, with placeholders for its port and the services."""
    options = readme_options()
    config: dict[str, Any] = json.loads(options[-1])
    # A slow machine must not turn an answer into a miss.
    slow = {"call_timeout_s": 10.0, "store_timeout_s": 10.0, "lookup_wait_s": 10.0}
    config["linker_extra_config"] = {"cache": "{cache}", "redis": "{redis}", **slow}
    paths = os.pathsep.join((str(ROOT), str(stubs)))
    environment = ["HF_HUB_OFFLINE=1", f"PYTHONPATH={paths}", *ENVIRONMENT[model.name]]
    server = [python, "-m", "sglang.launch_server", "--model-path", str(model)]
    pages = ["--page-size", str(PAGE_TOKENS[model.name])]
    return ["env", *environment, *server, *OPTIONS.split(), *pages, *options[:-1], json.dumps(config)]


def main() -> int:
    python, folder, stubs = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    make = [python, "-m", "benchmarks.conformance.tiny_models", str(folder)]
    subprocess.run(make, check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    ask = [python, "-c", "import importlib.metadata as m; print(m.version('sglang'))"]
    version = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    failed = 0
    for model in sys.argv[4:] or PAGE_TOKENS:
        scenes = ["--name", f"sglang {version}, {model}", "--model", "tiny", "--tail", TAILS.get(model, "")]
        scenes += ["--page-tokens", str(PAGE_TOKENS[model]), "--reset", "/flush_cache?timeout=30"]
        scenes += ["--metric", METRIC, "--out", str(RESULT), "--"]
        failed += run_scenes([*scenes, *command(python, stubs, folder / model)])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
