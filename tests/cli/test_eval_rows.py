"""When a row of the evaluation counts as failed, and what the table shows; no service is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from cli.client import Answer
from cli.evaluation.plot import eval_plot
from cli.evaluation.result import Marks, Reply, WayResult
from cli.evaluation.run import LeastAccuracy, expect_accuracy, play_ways
from cli.evaluation.services import EvalServices
from cli.evaluation.sheets import Asked, Sheet, SheetPlan
from cli.evaluation.table import eval_table
from cli.evaluation.ways import WAYS, Way
from cli.output import Output
from protos.v1.worker_pb2 import Usage
from register_qa import Kind, Split, draw_questions, draw_register
from tests.cli.command import stemcache
from tests.cli.test_views import WIDTHS, drawn

REGISTER = draw_register(1, split=Split.EVAL, holdings=10)
QUESTIONS = draw_questions(REGISTER, 1, 6)
PREFIX = tuple(range(100))
ASKED = tuple(Asked(question, (*PREFIX, 1000 + at)) for at, question in enumerate(QUESTIONS))
SHEET = Sheet(REGISTER, PREFIX, ASKED)


def reply(at: int, *, cached: int = 96, fetched: int = 0, text: str = "", reuses: bool = True) -> Reply:
    said = text or f" {QUESTIONS[at].answer}\n"
    usage = Usage(prompt_tokens=101, cached_tokens=cached, fetched_tokens=fetched, computed_tokens=101 - cached)
    return Reply(SHEET, ASKED[at], Answer("worker", text=said, token_ids=[7, at], usage=usage), reuses, 0.0)


def cold_answers() -> dict[Asked, Answer]:
    return {ASKED[at]: reply(at).answer for at in range(len(ASKED))}


def counted(*replies: Reply) -> WayResult:
    result = WayResult("device", "cached on the device")
    result.expect_hits(replies)
    result.count(replies, cold_answers())
    return result


def test_a_row_that_holds() -> None:
    result = counted(*(reply(at) for at in range(6)))
    assert result.failures == []
    assert (result.questions, result.same_text, result.warm, result.hit_share) == (6, 6, 6, 0.96)
    assert (result.one_fact.accuracy, result.two_facts.accuracy) == (1.0, 1.0)
    assert (result.one_fact.asked, result.two_facts.asked) == (5, 1)
    assert (result.prompt, result.cached, result.computed) == (606, 576, 30)


def test_a_wrong_answer_counts_for_its_kind() -> None:
    two_facts = next(at for at, question in enumerate(QUESTIONS) if question.kind is Kind.TWO_FACTS)
    result = counted(*(reply(at, text="Nowhere." if at == two_facts else "") for at in range(6)))
    assert (result.one_fact.accuracy, result.two_facts.accuracy) == (1.0, 0.0)


def test_a_single_miss_fails_the_row() -> None:
    result = counted(reply(0), reply(1, cached=89), reply(2))
    assert result.failures == ["1 requests reused less than 90% of their register, the first one 89 of 100 tokens"]


def test_the_first_of_siblings_may_compute_but_somebody_must_reuse() -> None:
    assert counted(reply(0, cached=0, reuses=False), reply(1, cached=0, fetched=96)).failures == []
    assert counted(reply(0, cached=0, reuses=False)).failures == ["no request was to reuse anything"]


def test_reuse_beyond_the_register_counts_once() -> None:
    assert counted(reply(0, cached=100, fetched=1)).hit_share == 1.0


def test_another_text_than_the_cold_one_fails_the_row() -> None:
    other = reply(1)
    other.answer.token_ids[-1] += 1
    result = counted(reply(0), other)
    assert result.failures == ["1 answers differ from their cold run"]
    assert result.same_text == 1


@pytest.mark.parametrize(("right", "fails"), [(97, False), (96, True)])
def test_an_accuracy_below_what_the_model_is_known_for_is_a_failure(right: int, fails: bool) -> None:
    cold = WayResult("cold", "cold", one_fact=Marks(100, right))
    expect_accuracy(cold, LeastAccuracy(0.97, 0.9))
    assert bool(cold.failures) == fails
    if fails:
        assert cold.failures == ["one-fact accuracy is 96.0%, at least 97% is wanted"]


async def test_a_way_that_breaks_off_is_a_failed_row_and_the_next_one_is_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaking(services: EvalServices, result: WayResult) -> list[Reply]:
        raise ConnectionError("nobody [there]")

    async def empty(services: EvalServices, result: WayResult) -> list[Reply]:
        return []

    async def fine(services: EvalServices, result: WayResult) -> list[Reply]:
        return [reply(at, reuses=False) for at in range(6)]

    for name, play in {"cold": fine, "device": breaking, "sibling": empty}.items():
        monkeypatch.setitem(WAYS, name, Way(name, play))
    services = cast(EvalServices, EvalServices(*[cast(Any, None)] * 4, [SHEET], 16))
    results = await play_ways(services, ["cold", "device", "sibling"], Output(as_json=True))
    assert [result.failures for result in results] == [
        [],
        ["ConnectionError: nobody [there]"],
        ["nothing was asked"],
    ]


def rows() -> list[WayResult]:
    counts = {"prompt": 604_123, "cached": 598_400, "fetched": 12_345, "computed": 604_123}
    made = [
        WayResult(name, way.title, 200, Marks(167, 166), Marks(33, 32), **counts, same_text=200)
        for name, way in WAYS.items()
    ]
    made[1].warm, made[1].hit_share, made[1].first_token_s = 200, 0.9973, 12.3456
    made[2].same_text, made[2].failures = 199, ["1 answers differ [from] their cold run"]
    made.append(WayResult("broken", "one that broke off", failures=["TimeoutError: "]))
    return made


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_is_whole(width: int) -> None:
    text = drawn(eval_table(rows(), width), width)
    for word in ("99.4%", "97.0%", "604,123", "598,400", "99.7%", "12,346 ms", "yes", "199", "failed"):
        assert word in text, word
    assert "failed: 1 answers differ [from] their cold run" in text
    assert "from a sibling that still runs" in text


def test_the_plot_leaves_out_what_was_not_measured() -> None:
    way = {"way": "cold", "title": "a < b", "one_fact_accuracy": 0.5, "two_facts_accuracy": None, "first_token_s": 0.25}
    head = {"questions": 4, "registers": 2, "dtype": "float32", "device": "cpu"}
    drawing = eval_plot({**head, "ways": [{**way, "questions": 4}, {**way, "questions": 0, "title": "broken"}]})
    assert drawing.count("<rect") == 2
    assert "a &lt; b" in drawing and "broken" not in drawing
    assert "50.0%" in drawing and "250 ms<" in drawing and "the wait for" not in drawing
    drawing = eval_plot({**head, "ways": [{**way, "way": "sibling", "questions": 4}]})
    assert "250 ms*<" in drawing and "* with the wait for the earlier request" in drawing


def test_questions_spread_over_the_registers() -> None:
    assert SheetPlan(11, 3, 1000, tuple(Kind), 0).shares() == [4, 4, 3]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8, 20])
def test_registers_come_in_turn_and_none_comes_twice(count: int) -> None:
    parts = EvalServices(*[cast(Any, None)] * 4, [SHEET] * count, 16).in_turn()
    assert sum(map(len, parts)) == count
    # Two at least: a small pool drops a register only for another one.
    assert all(2 <= len(part) < 8 for part in parts)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--kind", "colour"), "--kind: must be one of room"),
        (("--way", "magic"), "--way: must be one of cold"),
        (("--tokens", "599"), "--tokens: 599 is not in the range x>=600"),
        (("--questions", "30", "--registers", "20"), "--questions: needs two for each of 20 registers"),
        (("--registers", "1"), "--registers"),
        (("--plot", "/nowhere/at/all.svg"), "--plot: there is no folder"),
        (("--device", "tpu"), "--device: must be one of auto"),
        (("--kv-dtype", "int8"), "--kv-dtype: must be one of auto, fp8_e4m3"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    done = stemcache(tmp_path, "eval", *arguments, COLUMNS="200")
    assert done.returncode == 2
    assert done.stdout == ""
    assert complaint in done.stderr.replace("'", "")
