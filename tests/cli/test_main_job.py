"""The README's main job, `stemcache demo`, as a real process: every scene with the counts that it promises."""

from __future__ import annotations

import signal
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from cli import serve
from cli.__main__ import app
from cli.client import Answer
from cli.demo import passed, play_scenes
from cli.output import Output
from cli.redis_server import find_redis_binary
from cli.stage import HOLDINGS, SceneResult, Stage
from protos.v1.worker_pb2 import TokenLogprobs, Usage
from register_qa import Split, draw_register
from tests.cli.command import Running, one_object, pauses
from worker_service.model.tokenizer import Tokenizer

PAGE = 16


class Demo:
    """One whole run: what it printed, and who was left."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        running = Running(folder, folder / "state", "demo", "--json", *arguments)
        try:
            self.code = running.wait()
        finally:
            running.end()
        self.stderr = running.err.read_text()
        self.children = running.seen
        assert self.code == 0, self.stderr + running.out.read_text()
        self.report = one_object(running.out.read_text())
        self.scenes = {scene["number"]: scene for scene in self.report["scenes"]}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo(tmp_path_factory.mktemp("demo"))


def test_every_scene_is_played_and_holds(demo: Demo) -> None:
    assert demo.report["passed"] is True
    assert sorted(demo.scenes) == [1, 2, 3, 4, 5, 6]
    for scene in demo.scenes.values():
        assert scene["failures"] == []
        assert scene["same_answer"] is True
        assert scene["ties"] == 0 or scene["number"] in (3, 6)
        if not scene["skipped"]:
            assert scene["prompt"] == scene["cached"] + scene["fetched"] + scene["computed"]
            assert scene["cold_s"] > 0
            assert scene["warm_s"] > 0


def prefix_tokens(demo: Demo, number: int) -> int:
    """Tokens of the register with this number, in whole pages."""
    register = draw_register(number, split=Split.EVAL, holdings=HOLDINGS)
    tokenizer = Tokenizer(Path(demo.report["model"]) / "tokenizer.json")
    return len(tokenizer.encode(register.text)) // PAGE * PAGE


def test_eight_users_cost_one_prefill(demo: Demo) -> None:
    scene = demo.scenes[1]
    shared = prefix_tokens(demo, 1)
    assert shared > 1000
    assert scene["requests"] == 8
    assert scene["cached"] >= 7 * shared
    assert scene["computed"] <= scene["prompt"] - 7 * shared


def test_the_sibling_of_a_request_that_still_decodes(demo: Demo) -> None:
    scene = demo.scenes[2]
    assert scene["requests"] == 1
    assert scene["cached"] >= prefix_tokens(demo, 2)
    assert 0 < scene["computed"] < 4 * PAGE


def test_the_second_turn_hits_what_the_first_one_generated(demo: Demo) -> None:
    scene = demo.scenes[3]
    assert scene["cached"] > prefix_tokens(demo, 3)
    assert int(scene["note"].split()[0]) >= PAGE, scene["note"]


def test_the_other_worker_fetches(demo: Demo) -> None:
    scene = demo.scenes[4]
    if find_redis_binary() is None:
        assert scene["skipped"]
        return
    assert scene["cached"] == 0
    assert scene["fetched"] >= prefix_tokens(demo, 4)


def test_the_killed_worker_came_back_and_traffic_saved_tokens(demo: Demo) -> None:
    assert "worker-1 is back after 1 restart" in demo.scenes[5]["note"]
    assert "worker-1 ended with code -9" in demo.stderr
    traffic = demo.scenes[6]
    assert traffic["requests"] == 20
    assert traffic["cached"] + traffic["fetched"] > traffic["prompt"] // 2


def test_the_answers_are_sentences_that_the_register_bears_out(demo: Demo) -> None:
    shown = [sentence for scene in demo.scenes.values() for sentence in scene["shown"]]
    assert len(shown) >= 12
    assert all(sentence["question"].endswith("?") for sentence in shown)
    assert all(sentence["saved"] <= sentence["prompt"] for sentence in shown)
    wrong = [sentence for sentence in shown if not sentence["right"]]
    assert len(wrong) <= 1, wrong


def test_progress_goes_to_stderr_and_no_child_is_left(demo: Demo) -> None:
    assert all(f"scene {number} took" in demo.stderr for number in range(1, 7))
    # Redis, the cache service, two workers, and the one that came back.
    assert len(demo.children) >= (5 if find_redis_binary() else 4)
    assert not [child for child in demo.children if child.alive()]


def test_without_a_shared_tier_the_scene_says_so(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--host-tier", "none", "--scene", "4", "--scene", "3")
    assert sorted(demo.scenes) == [3, 4]
    assert demo.report["passed"] is True
    assert demo.scenes[4]["skipped"] == "no shared host tier"
    assert demo.scenes[4]["requests"] == 0
    assert demo.scenes[3]["cached"] > 0
    assert not [child for child in demo.children if child.alive()]


async def fine(stage: Stage) -> SceneResult:
    """A scene that holds."""
    return SceneResult("fine", requests=1)


async def disappointing(stage: Stage) -> SceneResult:
    """A scene that expects too much."""
    result = SceneResult("disappointing", requests=1)
    result.expect(False, "expected 336 cached, got 0")
    return result


async def breaking(stage: Stage) -> SceneResult:
    """A scene that breaks off."""
    raise ConnectionError("nobody [there]")


STAGE = cast(Stage, None)  # none of these scenes looks at it


async def test_a_failed_scene_is_reported_and_the_next_one_played() -> None:
    results = await play_scenes({1: disappointing, 2: breaking, 3: fine}, STAGE, Output(as_json=True))
    assert [result.number for result in results] == [1, 2, 3]
    assert results[0].failures == ["expected 336 cached, got 0"]
    assert results[1].failures == ["ConnectionError: nobody [there]"]
    assert not results[1].same_answer
    assert passed(results[2:])
    assert not passed(results)


@pytest.fixture
def keep_signals() -> Iterator[None]:
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)


@pytest.mark.usefixtures("keep_signals")
@pytest.mark.parametrize("as_json", [True, False])
def test_a_failed_scene_makes_the_exit_code_non_zero(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(*arguments: Any) -> list[SceneResult]:
        return await play_scenes({1: fine, 2: disappointing, 3: breaking}, STAGE, Output(as_json=as_json))

    monkeypatch.setattr(serve, "play", play)
    done = CliRunner().invoke(app, ["demo", "--model", "unused", *(["--json"] if as_json else [])])
    assert done.exit_code == 1
    if as_json:
        report = one_object(done.stdout)
        assert report["passed"] is False
        assert report["scenes"][1]["failures"] == ["expected 336 cached, got 0"]
    else:
        assert "failed: expected 336 cached, got 0" in done.stdout
        assert "failed: ConnectionError: nobody [there]" in done.stdout


def answer(tokens: list[int], cached: int, other: tuple[int, float] | None = None) -> Answer:
    """`other` is a token that the model rated by this much less than each of its own."""
    rated = [] if other is None else [TokenLogprobs(logprob=-1.0) for _ in tokens]
    for token, one in zip(tokens, rated, strict=False):
        one.top_ids = array("i", [token, other[0]]).tobytes() if other else b""
        one.top_logprobs.extend([-1.0, -1.0 - other[1]] if other else [])
    usage = Usage(cached_tokens=cached)
    return Answer("worker", token_ids=tokens, first_token_s=0.1, usage=usage, logprobs=rated)


def test_a_comparison_fails_for_another_answer_and_for_a_cold_run_that_was_warm() -> None:
    same, other, warm_cold = SceneResult("same"), SceneResult("other"), SceneResult("warm")
    same.compare([answer([1, 2], 16)], [answer([1, 2], 0)])
    other.compare([answer([1, 2], 16)], [answer([1, 3], 0)])
    warm_cold.compare([answer([1, 2], 16)], [answer([1, 2], 16)])
    assert same.same_answer and not same.failures
    assert not other.same_answer and other.failures == ["an answer differs from its cold run"]
    assert warm_cold.failures == ["a cold run hit the cache"]


@pytest.mark.parametrize(("gap", "same"), [(0.0, True), (0.125, True), (0.5, False)])
def test_only_a_tie_of_the_cold_run_excuses_another_answer_and_only_where_it_may(gap: float, same: bool) -> None:
    warm, cold = answer([1, 3, 9], 16), answer([1, 2, 4], 0, other=(3, gap))
    lenient, strict = SceneResult("lenient"), SceneResult("strict")
    lenient.compare([warm], [cold], ties=True)
    strict.compare([warm], [cold])
    assert (lenient.same_answer, lenient.ties, not lenient.failures) == (same, int(same), same)
    assert not strict.same_answer and strict.failures
    unrated = SceneResult("a token that the cold run did not even rate")
    unrated.compare([answer([1, 7], 16)], [answer([1, 2], 0, other=(3, gap))], ties=True)
    assert not unrated.same_answer


def test_ctrl_c_ends_the_demo_and_its_children(tmp_path: Path) -> None:
    running = Running(tmp_path, tmp_path / "state", "demo", "--json")
    try:
        for _ in pauses("two children"):
            if len(running.look()) >= 2:
                break
        assert running.interrupt() == 130
        assert not [child for child in running.seen if child.alive()]
        assert running.out.read_text() == ""
    finally:
        running.end()
