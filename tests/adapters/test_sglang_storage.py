"""SGLang's own host pools through the storage. STEMCACHE_SGLANG names the interpreter that has SGLang."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from tests.adapters.test_sglang_engine import MODEL, PYTHON, ROOT, Stage, pytestmark, stage

__all__ = ["pytestmark", "stage"]

NOTHING = [0, {}, []]


def found(module: str, stage: Stage) -> dict[str, Any]:
    """What the module has printed, run in SGLang's interpreter."""
    command = [PYTHON, "-m", module, MODEL, stage.cache.address, stage.redis.url]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("STEMCACHE_SGLANG_PATH", "")]))
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
    said = [line.removeprefix("FOUND ") for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
    assert said, ran.stderr[-2000:]
    answer: dict[str, Any] = json.loads(said[0])
    return answer


def test_its_host_pools_go_through_the_storage(stage: Stage) -> None:
    layouts = found("tests.adapters.sglang_storage", stage)
    assert set(layouts) == {"page_first", "page_first_direct", "layer_first"}
    for layout, ways in layouts.items():
        assert ways == {
            "before": 0, "written": [True] * 5, "present": 5, "read": [True] * 5, "same": True,
            "older": [True, True], "other rank": 0,
        }, layout  # fmt: skip
    assert stage.attachments().committed_pages == 15


def test_windows_and_states_are_found_at_their_own_boundaries(stage: Stage) -> None:
    said = found("tests.adapters.sglang_hybrid_storage", stage)
    for layout in ("page_first", "page_first_direct"):
        assert said[layout] == {
            "before": NOTHING,
            "written": {"kv": [True] * 8, "swa": [True] * 6, "mamba": [True] * 2},
            "whole": [8, {"kv": 8, "mamba": 8, "swa": 8}, [8]],
            # The last state within seven pages is at five, and the window before it is there.
            "shorter": [5, {"kv": 7, "mamba": 5, "swa": 5}, [5]],
            "no state": [0, {"kv": 4}, []],
            "tokens alone": [[8, {"kv": 8}, list(range(1, 9))], 8],
            "read": {"swa": [True] * 3, "mamba": [True]},
            "same": [True, True],
            "never written": [[False]],
            "other rank": NOTHING,
        }, layout
    injected = said["injected"]
    assert (injected["injector"], injected["wrong"]) == ("HiCacheStorageFailureInjector", 0)
    assert injected["read"] > 0 and injected["failed"] > 0, injected
