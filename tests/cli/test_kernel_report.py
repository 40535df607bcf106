"""The figures of kernels in the documents are those of the committed runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.eval_report import inserted
from benchmarks.kernel_report import BEGIN, DOCUMENT, END, FILES, best_peer, block, read_reports

ABOUT = {"device": "NVIDIA H200", "driver": "1", "torch": "2", "triton": "3", "ceilings": {
    "copy_gb_per_s": 4200.0, "read_gb_per_s": 4500.0, "gemm_bf16_tflops": 790.0,
}}  # fmt: skip


def row(op: str, case: str, figure: float | None, **peers: float | str) -> dict[str, Any]:
    us = None if figure is None else 12.3
    ends = {"microseconds": us, "of_ceiling": None, "peers": peers}
    return {"op": op, "case": case, "unit": "GB/s", "figure": figure, **ends}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        [row("decode_attention", "B1", 100.0), row("append_kv", "65536 tokens", 3474.0)],
        [row("decode_attention", "B1", 110.0, one=120.0, two=90.0, three="refused"), row("mla_decode", "B1", None)],
    ]
    for name, each in zip((FILES[0], FILES[-1]), rows, strict=True):
        (tmp_path / name).write_text(json.dumps({**ABOUT, "commit": name[-6], "rows": each}))
    for name in FILES[1:-1]:
        (tmp_path / name).write_text(json.dumps({**ABOUT, "commit": "2", "rows": []}))
    return tmp_path


def test_the_document_has_the_committed_runs() -> None:
    text = DOCUMENT.read_text()
    assert inserted(text, block(read_reports()), BEGIN, END) == text


def test_a_newer_run_replaces_a_case(folder: Path) -> None:
    made = block(read_reports(folder))
    assert "| `decode_attention` | B1 | 110 GB/s | 12.3 |" in made
    assert "100 GB/s" not in made
    assert made.index("decode_attention") < made.index("append_kv")


def test_what_has_no_figure_is_left_out(folder: Path) -> None:
    assert "mla_decode" not in block(read_reports(folder))


def test_a_missed_target_is_said(folder: Path) -> None:
    assert "| 3,860 (**-10.0%**) |" in block(read_reports(folder))


def test_peers_stand_side_by_side(folder: Path) -> None:
    assert "| B1 | 110 | **120** | 90 |" in block(read_reports(folder))


def test_a_complaint_is_no_best_peer() -> None:
    assert best_peer(row("x", "y", 1.0, slow=2.0, fast=3.0, none="refused")) == ("fast", 3.0)
    assert best_peer(row("x", "y", 1.0)) == ("", 0.0)
