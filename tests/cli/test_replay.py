"""`stemcache replay` on a trace that is small enough to be worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cache_service.core.device.eviction_order import POLICIES
from cli.__main__ import app
from tests.cli.command import one_object, stemcache

FIELDS = {"requests", "requests_per_s", "hit_rate", "p50_ms", "p99_ms", "evicted_pages", "peak_rss_mb"}
ROWS = [
    {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]},
    {"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [3, 4]},
    # All of the first one again, but the last token must be computed, so the last page is not reused.
    {"timestamp": 2, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]},
    # Half of it.
    {"timestamp": 3, "input_length": 600, "output_length": 40, "hash_ids": [1, 5]},
]
PROMPT_TOKENS = 1024 + 1024 + 1024 + 600


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["replay", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def figures(*arguments: str) -> dict[str, Any]:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return one_object(done.stdout)


def test_the_figures_of_a_real_process(trace: str, tmp_path: Path) -> None:
    done = stemcache(tmp_path, "replay", trace, "--pages", "0", "--page-tokens", "16", "--policy", "lru", "--json")
    assert done.returncode == 0, done.stderr
    made = one_object(done.stdout)
    assert set(made) == FIELDS
    assert made["requests"] == 4
    assert made["hit_rate"] == (1008 + 512) / PROMPT_TOKENS
    assert made["evicted_pages"] == 0
    assert 0 < made["p50_ms"] <= made["p99_ms"]
    assert made["requests_per_s"] > 0
    assert made["peak_rss_mb"] > 1
    assert "replaying" in done.stderr


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_small_pool_evicts(trace: str, policy: str) -> None:
    # One prompt of 64 pages fits, two do not: nothing of the first is left for the third but what eviction spared.
    made = figures(trace, "--pages", "70", "--policy", policy)
    assert made["evicted_pages"] >= 58
    assert made["hit_rate"] < (1008 + 512) / PROMPT_TOKENS


def test_several_policies_and_sizes_make_a_table(trace: str) -> None:
    made = figures(trace, "--pages", "70, 1k,0", "--policy", "lru,slru")["runs"]
    assert [(run["policy"], run["num_pages"]) for run in made] == [
        (policy, size) for policy in ("lru", "slru") for size in (70, 1000, 0)
    ]
    # Each one begins with an empty manager.
    assert {run["hit_rate"] for run in made if run["num_pages"] != 70} == {(1008 + 512) / PROMPT_TOKENS}
    assert all(run["evicted_pages"] >= 58 for run in made if run["num_pages"] == 70)
    shown = invoke(trace, "--pages", "1k,0", "--policy", "lru,slru")
    rows = [line.split()[:3] for line in shown.stdout.splitlines() if line.startswith(("lru", "slru"))]
    assert rows == [[policy, size, "41.39%"] for policy in ("lru", "slru") for size in ("1,000", "unlimited")]
    assert shown.stderr.count("replaying") == 4


@pytest.mark.parametrize("pages", ["", "x", "-1", "1.5", "5g", "2148m", "1,,2"])
def test_a_wrong_size_is_told(trace: str, pages: str) -> None:
    done = invoke(trace, "--pages", pages)
    assert done.exit_code == 2
    assert "--pages" in done.stderr


def test_the_benchmark_tells_a_trace_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.bench_core", "--trace", str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith(f"error: --trace: {tmp_path / 'absent'}: No such file or directory\n")


def test_larger_pages_reuse_less(trace: str) -> None:
    assert figures(trace, "--pages", "0", "--page-tokens", "512")["hit_rate"] == (512 + 512) / PROMPT_TOKENS


def test_only_the_first_requests(trace: str) -> None:
    made = figures(trace, "--pages", "0", "--requests", "3")
    assert made["requests"] == 3
    assert made["hit_rate"] == 1008 / 3072


def test_the_table_for_people(trace: str) -> None:
    done = invoke(trace, "--pages", "0")
    assert done.exit_code == 0
    assert "41.39%" in done.stdout
    assert "evicted pages" in done.stdout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no request"),
        ("{", "line 1 is not a request"),
        ("[1]\n", "line 1 is not a request"),
        (json.dumps(ROWS[0]) + "\n{}\n", "line 2 is not a request"),
        (json.dumps({**ROWS[0], "input_length": 1025}) + "\n", "input_length"),
        (json.dumps({**ROWS[0], "input_length": -1}) + "\n", "input_length"),
        (json.dumps({**ROWS[0], "hash_ids": ["x", "y"]}) + "\n", "hash_ids: 'x' is not an integer"),
        (json.dumps({**ROWS[0], "hash_ids": [1, [2]]}) + "\n", "hash_ids: [2] is not an integer"),
        (json.dumps({**ROWS[0], "hash_ids": 7}) + "\n", "line 1 is not a request"),
        (json.dumps({**ROWS[0], "output_length": 0.5}) + "\n", "output_length: 0.5 is not an integer"),
        (json.dumps({**ROWS[0], "output_length": -1}) + "\n", "output_length: -1 is not within"),
        (json.dumps({**ROWS[0], "output_length": 10**15}) + "\n", "output_length: 1000000000000000 is not within"),
    ],
)
def test_a_bad_trace_is_told(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    done = invoke(str(path), "--json")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert complaint in done.stderr
    assert "bad.jsonl" in done.stderr


def test_a_trace_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, complaint in (("absent", "No such file"), (".", "directory"), ("binary", "line 1")):
        done = invoke(str(tmp_path / name))
        assert done.exit_code == 1
        assert complaint in done.stderr


def test_an_unknown_policy_is_told_before_the_trace_is_read(tmp_path: Path) -> None:
    done = invoke(str(tmp_path / "absent"), "--policy", "fifo")
    assert done.exit_code == 2
    assert "--policy" in done.stderr
    assert "slru" in done.stderr
