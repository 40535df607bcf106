"""The README's table and plot are those of the committed run, and that run shows what the README says of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.eval_report import ON_H200, PLOT, README, REPORT, inserted, readme_block
from cli.evaluation.plot import eval_plot
from cli.evaluation.ways import WAYS


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    read = json.loads(REPORT.read_text())
    assert isinstance(read, dict)
    return read


def test_the_readme_has_the_table_of_the_committed_run(report: dict[str, Any]) -> None:
    text = README.read_text()
    block = readme_block(report, json.loads(ON_H200.read_text()))
    assert inserted(text, block) == text, "run `python -m benchmarks.eval_report`"
    assert PLOT.read_text() == eval_plot(report), "run `python -m benchmarks.eval_report`"


def test_the_committed_run_is_whole_and_passed(report: dict[str, Any]) -> None:
    assert report["passed"] is True
    assert (report["questions"], report["registers"]) == (200, 20)
    assert report["model"] == "the one in the box"
    assert [way["way"] for way in report["ways"]] == list(WAYS)


def test_the_committed_run_reaches_its_accuracy_in_every_row(report: dict[str, Any]) -> None:
    for way in report["ways"]:
        assert way["one_fact_accuracy"] >= 0.97, way["way"]
        assert way["two_facts_accuracy"] >= 0.90, way["way"]
        assert way["same_text"] == way["questions"] == 200, way["way"]
        assert way["way"] == "cold" or way["hit_share"] > 0.9, way["way"]


def test_the_run_on_a_gpu_passed_too() -> None:
    report = json.loads(ON_H200.read_text())
    assert report["passed"] is True
    ran_on = (report["device"].split(":")[0], report["dtype"], report["model"])
    assert ran_on == ("cuda", "bfloat16", "the one in the box")
    assert [way["way"] for way in report["ways"]] == list(WAYS)


def test_a_readme_without_markers_is_told() -> None:
    with pytest.raises(ValueError, match="eval"):
        inserted("# No figures\n", "block")
