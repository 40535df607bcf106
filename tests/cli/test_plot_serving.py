"""The README's serving figures and their plot are those of the committed run, and leave out what was not measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.eval_report import README, inserted
from benchmarks.plot_serving import BEGIN, END, PLOT, STOPPED_REPORT, read_report, readme_block, with_later
from benchmarks.serving.figures import Row, without_figures
from benchmarks.serving.plot import serving_plot, share_bars, stream_bars

STEADY = {"tokens_per_s": 9126.4, "itl_ms_p50": 6.9, "itl_ms_p99": 7.64, "wall_ms": 6.95, "ttft_ms_p50": 343.0}


def timed(row: Row, **figures: Any) -> dict[str, Any]:
    return {**asdict(row), **figures}


@pytest.fixture
def report() -> dict[str, Any]:
    streams = Row("streams_64_330", "streams", 64, 330, 160)
    wrong = without_figures(Row("streams_16_330", "streams", 16, 330, 160, failures=["stream 3: other tokens"]))
    first = {"ttft_ms_min": 30.2, "ttft_ms_p50": 71.0, "ttft_ms_max": 145.4}
    shares = [Row(f"share_{cached}", "share", 1, 8192, 8, cached_tokens=cached) for cached in (8176, 0)]
    burst = Row("burst_cached", "burst", 8, 4608, 8, cached_tokens=4096)
    arrivals = Row("arrivals", "arrivals", 64, 330, 2000)
    during = {"arriving": 2048.0, "every_s": 0.25, "quiet_itl_ms_p50": 6.5}
    stopped = Row("stopped", "stopped", 64, 330, 6000)
    rows = [
        timed(streams, **STEADY),
        asdict(wrong),
        timed(Row("prompt_600", "prompt", 1, 600, 8), ttft_ms_p50=35.71),
        timed(Row("alone_cached", "alone", 1, 4608, 8, cached_tokens=4096), ttft_ms_p50=17.4),
        timed(burst, **first),
        timed(arrivals, itl_ms_p99=12.9, ttft_ms_p50=60.0, detail=during),
        *(timed(row, ttft_ms_p50=224.0 - row.cached_tokens / 40) for row in shares),
        timed(stopped, silence_ms_max=1234.5, ttft_ms_p50=60.0, detail={"stopped_s": 20.01}),
        {**asdict(Row("streams_256_4096", "streams", 256, 4096, 160)), "skipped": "needs pages"},
    ]
    about = {"commit": "0123abc", "model": "random, as Llama 3.1 8B", "dtype": "bfloat16", "device": "cuda:0"}
    return {**about, "gpu": "NVIDIA H200", "clients": 4, "rows": rows}


def test_the_readme_has_the_figures_of_the_committed_run() -> None:
    text, committed = README.read_text(), read_report()
    assert inserted(text, readme_block(committed, read_report(STOPPED_REPORT)), BEGIN, END) == text, (
        "run `python -m benchmarks.plot_serving`"
    )
    assert committed is not None
    assert PLOT.read_text() == serving_plot(committed), "run `python -m benchmarks.plot_serving`"


def test_the_committed_run_passed() -> None:
    report = read_report()
    assert report is not None and report["rows"]
    failed = {row["name"]: row["failures"] for row in report["rows"] if row["failures"]}
    assert not failed


def test_the_table_has_what_was_measured_only(report: dict[str, Any]) -> None:
    block = readme_block(report)
    assert "| 64 | 330 | 9,126 | 6.90, 7.64 | 6.95 |  |  | 343.0 |" in block
    assert "| 16 |" not in block and "| 256 |" not in block
    for sentence in (
        "600 tokens 35.7 ms",
        "4,096 cached and 512 own tokens alone: 17.4 ms",
        "cached 30, 71 and 145 ms",
        "an inter-token p99 of 12.9 ms; their median before is 6.5 ms",
        "stopped for 20 s, the longest silence of 64 decoding streams is 1,234 ms",
    ):
        assert sentence in block


@pytest.mark.parametrize(("share", "shown"), [(-0.0008, "0.0%"), (-0.0, "0.0%"), (0.0021, "0.2%"), (None, "")])
def test_a_device_is_never_idle_for_less_than_nothing(report: dict[str, Any], share: float | None, shown: str) -> None:
    row = timed(Row("streams_1_330", "streams", 1, 330, 160), **STEADY, device_ms=6.95, idle_share=share)
    assert f"| 6.95 | 6.95 | {shown} |" in readme_block({**report, "rows": [row]})


def test_the_table_is_in_the_order_of_prompts_and_streams(report: dict[str, Any]) -> None:
    sizes = [(330, 64), (4096, 1), (330, 1), (330, 16)]
    rows = [timed(Row("", "streams", streams, context, 160), **STEADY) for context, streams in sizes]
    lines = [line.split(" | ")[:2] for line in readme_block({**report, "rows": rows}).splitlines() if "9,126" in line]
    assert lines == [["| 1", "330"], ["| 16", "330"], ["| 64", "330"], ["| 1", "4,096"]]


def test_a_run_of_some_cases_only(report: dict[str, Any]) -> None:
    block = readme_block({**report, "rows": report["rows"][:1]})
    assert "- " not in block.replace("| --- ", "").replace("<!-- ", "")


def test_a_run_of_the_stopped_case_alone_takes_the_place_of_the_older_one(report: dict[str, Any]) -> None:
    detail = {"stopped_s": 20.0, "filled_tokens": 1}
    row = timed(Row("stopped", "stopped", 64, 330, 6000), ttft_ms_p50=1.0, silence_ms_max=44.3, detail=detail)
    block = readme_block(report, {**report, "rows": [row]})
    assert "streams in a pool full of cached prompts is 44 ms." in block
    assert "1,234 ms" not in block


def test_the_plot_is_a_drawing_of_the_rows(report: dict[str, Any]) -> None:
    shares, streams = share_bars(report["rows"]), stream_bars(report["rows"])
    assert [(bar.name, bar.figure) for bar in shares] == [("0% cached", "224.0 ms"), ("100% cached", "19.6 ms")]
    assert [(bar.name, bar.figure) for bar in streams] == [("64 × 330", "9,126")]
    drawn = ElementTree.fromstring(serving_plot(report))
    bars = [element for element in drawn if element.tag.endswith("rect")]
    assert len(bars) == len(shares) + len(streams)
    texts = {element.text for element in drawn if element.tag.endswith("text")}
    assert {"0% cached", "9,126", "first token of 8,192 tokens, by what is cached, median"} <= texts
    assert serving_plot(report) == serving_plot(report)


def test_a_plot_of_nothing(report: dict[str, Any]) -> None:
    drawn = ElementTree.fromstring(serving_plot({**report, "rows": []}))
    assert not [element for element in drawn if element.tag.endswith("rect")]


def test_rows_of_a_later_run_take_the_place_of_the_older_ones_and_are_named(report: dict[str, Any]) -> None:
    old = timed(Row("streams_64_330", "streams", 64, 330, 160), **STEADY)
    other = timed(Row("streams_1_330", "streams", 1, 330, 160), **STEADY)
    new = {**old, "tokens_per_s": 11_804.0}
    both = with_later({**report, "rows": [old, other]}, {"commit": "abc1234", "rows": [new]})
    assert [row["tokens_per_s"] for row in both["rows"]] == [11_804.0, other["tokens_per_s"]]
    assert "`streams_64_330` of a later run on another card of the kind, commit abc1234" in readme_block(both)
