"""The serving benchmark: what it computes of streams, that wrong tokens get no figures, and a short run on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.bench_serving import model_name
from benchmarks.serving.answers import BRIEF_RUNS, BRIEF_TOKENS, Answers
from benchmarks.serving.checkpoint import LLAMA_8B, QUERY_KEY_GAIN, write_checkpoint
from benchmarks.serving.figures import (
    Counters,
    Row,
    Window,
    add_launches,
    inter_token_s,
    longest_silence_s,
    percentile,
    seconds_per_token,
    steady_window,
    tokens_in,
    without_figures,
)
from benchmarks.serving.load import QUICK, Sizes
from benchmarks.serving.plan import KINDS, all_cases
from benchmarks.serving.services import IDLE_SECONDS, LAUNCH_SECONDS, LAUNCHES, read_counters
from benchmarks.serving.streams import Message, Request, Stream, packed
from worker_service.metrics import WorkerMetrics
from worker_service.model.load import load_model
from worker_service.model.weights import open_weights

ROOT = Path(__file__).resolve().parents[2]


def stream(*messages: tuple[float, int], tokens: Sequence[int] = (), prompt: int = 1, finished: bool = True) -> Stream:
    """`messages`: when each came, and the tokens so far."""
    arrived = [Message(*message) for message in messages]
    made = Stream(Request(packed([prompt]), len(tokens), "salt"), 0.0, arrived, list(tokens))
    made.is_finished = finished
    return made


def test_the_steady_window_is_when_all_streams_decode() -> None:
    streams = [stream((1.0, 1), (2.0, 2), (4.0, 3)), stream((1.5, 1), (2.5, 2), (3.5, 3), (5.0, 4))]
    assert steady_window(streams) == Window(1.5, 4.0)
    assert steady_window(streams, not_before_s=2.0) == Window(2.0, 4.0)
    assert tokens_in(streams, Window(1.5, 4.0)) == 4


def test_tokens_of_one_message_share_its_time() -> None:
    streams = [stream((1.0, 1), (1.5, 2), (2.5, 6), (9.0, 7))]
    assert inter_token_s(streams, Window(1.0, 3.0)) == [0.5, 0.25, 0.25, 0.25, 0.25]
    assert inter_token_s(streams, Window(1.2, 3.0)) == [0.25] * 4


def test_a_silence_that_reaches_into_the_window_counts_whole() -> None:
    running = stream((1.0, 1), (2.0, 2), (6.0, 3), finished=False)
    assert longest_silence_s([running], Window(3.0, 6.5)) == 4.0
    assert longest_silence_s([running], Window(6.2, 11.0)) == 5.0, "one that lasts ends with the window"
    assert longest_silence_s([stream((1.0, 1), (2.0, 2))], Window(1.0, 9.0)) == 1.0, "an ended stream is not silent"


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (99, 99), (100, 100), (1, 1)])
def test_percentiles(percent: float, value: float) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == value
    assert percentile([7.0], percent) == 7.0


def test_the_time_of_a_launch_is_from_message_to_message() -> None:
    streams = [stream((0.5, 1), (1.0, 2), (1.5, 4), (2.0, 5), (2.5, 6)), stream((0.9, 3), (1.9, 7))]
    assert seconds_per_token(streams, Window(0.9, 2.1)) == pytest.approx(2.0 / 7)
    assert seconds_per_token(streams, Window(1.1, 1.6)) is None, "a message of one stream, and none of the other"


def test_launches_by_the_counters() -> None:
    row = Row("", "", 1, 1, 1)
    add_launches(row, 0.01, Counters(1.0, 100.0, 2.0, 0.5), Counters(2.0, 200.0, 2.75, 0.625))
    assert (row.wall_ms, row.device_ms, row.idle_share) == (10.0, 7.5, 0.25)
    assert row.detail == {"idle_share_by_worker": 0.125}


def test_counters_that_are_not_there_give_nothing() -> None:
    row = Row("", "", 1, 1, 1)
    add_launches(row, 0.01, Counters(1.0, 100.0, None), Counters(2.0, 200.0, None))
    assert (row.wall_ms, row.device_ms, row.idle_share, row.detail) == (10.0, None, None, {})
    add_launches(row, 0.02, Counters(1.0), Counters(2.0))
    assert (row.wall_ms, row.device_ms) == (20.0, None)
    row = Row("", "", 1, 1, 1)
    add_launches(row, None, Counters(1.0, 100.0, 2.0), Counters(2.0, 200.0, 2.5))
    assert row.wall_ms is None


def test_device_time_is_read_where_the_worker_has_it() -> None:
    """A worker that counts no idle time has the host's time in the same histogram."""
    host = f"# HELP x\n{LAUNCHES} 20.0\n{LAUNCH_SECONDS} 0.5\n"
    assert read_counters(host, 1.0) == Counters(1.0, 20.0)
    assert read_counters(f"{host}{IDLE_SECONDS} 0.25\n", 1.0) == Counters(1.0, 20.0, 0.5, 0.25)
    assert read_counters("", 1.0) == Counters(1.0)


def test_the_worker_has_the_counters() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    assert read_counters(generate_latest(registry).decode(), 1.0).launches == 0


class Model:
    """Answers each prompt with its own number, as clients that run prompts alone would see it."""

    def __init__(self, cached_tokens: int = 0) -> None:
        self.cached_tokens = cached_tokens
        self.lengths: list[int] = []

    @property
    def num_alone(self) -> int:
        return len(self.lengths)

    async def send(self, requests: Sequence[Request], **_: bool) -> list[Stream]:
        self.lengths += [request.max_tokens for request in requests]
        made = [Stream(request, token_ids=[request.prompt[0]] * request.max_tokens) for request in requests]
        for one in made:
            one.is_finished, one.cached_tokens = True, self.cached_tokens
        return made


async def checked(streams: list[Stream], cached: Sequence[int] | None = None, *, model: Model | None = None) -> Row:
    row = Row("streams", "streams", len(streams), 1, 3, tokens_per_s=1.0)
    await Answers(model or Model(), 2, 3).check(row, streams, cached)  # type: ignore[arg-type]
    return row


def answers(*tokens: Sequence[int]) -> list[Stream]:
    """Of prompts 1, 2, ..."""
    return [stream((1.0, len(one)), tokens=one, prompt=number) for number, one in enumerate(tokens, 1)]


async def test_right_tokens_pass() -> None:
    model = Model()
    row = await checked(answers([1, 1, 1], [2, 2, 2], [3, 3, 3]), [0, 0, 0], model=model)
    assert row.failures == []
    assert (row.compared, row.alone, model.num_alone) == (3, 3, 3)


async def test_some_run_alone_to_their_end_and_many_briefly() -> None:
    model, row = Model(), Row("", "", 100, 1, 40)
    held = Answers(model, 2, 40)  # type: ignore[arg-type]
    await held.check(row, answers(*([number] * 40 for number in range(1, 101))))
    assert (row.failures, row.alone) == ([], 2 * BRIEF_RUNS)
    assert sorted(model.lengths) == [BRIEF_TOKENS] * 30 + [40] * 2
    await held.check(row, answers([1] * 40))
    assert model.num_alone == 2 * BRIEF_RUNS, "what ran alone once need not again"


async def test_another_token_than_alone_leaves_no_figure() -> None:
    row = await checked(answers([1, 1, 7], [2, 2, 2]))
    assert row.failures == ["stream 0: other tokens than alone and cold"]
    bare = without_figures(row)
    assert bare.tokens_per_s is None
    assert bare.failures == row.failures


async def test_another_token_than_in_another_run_is_noticed() -> None:
    held, row = Answers(Model(), 1, 40), Row("", "", 2, 1, 40)  # type: ignore[arg-type]
    await held.check(row, answers([1] * 40, [2] * 40))
    assert (row.failures, row.compared) == ([], 2)
    await held.check(row, answers([1] * 40, [*[2] * 39, 9]))
    assert row.failures == ["stream 1: other tokens than in another run"]


@pytest.mark.parametrize("broken", ["error", "short", "cached", "same", "warm"])
async def test_what_makes_a_row_worthless(broken: str) -> None:
    streams, model = answers([1, 1, 1], [2, 2, 2]), Model(cached_tokens=16 if broken == "warm" else 0)
    if broken == "error":
        streams[1].error = "UNAVAILABLE: gone"
    elif broken == "short":
        streams[1].token_ids.pop()
    elif broken == "same":
        streams = [stream((1.0, 3), tokens=[1, 1, 1], prompt=prompt) for prompt in (1, 257)]
    row = await checked(streams, [0, 16] if broken == "cached" else [0, 0], model=model)
    assert row.failures


def test_every_kind_of_case_is_planned_for() -> None:
    for sizes in (Sizes(), QUICK):
        cases = list(all_cases(sizes))
        assert {case.row.kind for case in cases} == set(KINDS)
        assert len({case.row.name for case in cases}) == len(cases)


def test_the_checkpoint_of_random_weights_loads(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    write_checkpoint(tmp_path, torch.device("cpu"), {**LLAMA_8B, **small, **heads})
    assert model_name(str(tmp_path)) == LLAMA_8B["_name_or_path"]
    loaded = load_model(str(tmp_path), torch.device("cpu"), dtype="bfloat16")
    assert (len(loaded.spec.layers), loaded.spec.max_model_len) == (2, 16384)
    weights = open_weights(tmp_path, loaded.spec, torch.float32, torch.device("cpu"))
    assert weights.take("model.layers.1.mlp.down_proj.weight", 64, 96).std().item() == pytest.approx(96**-0.5, rel=0.1)
    queries = [weights.take(f"model.layers.{layer}.self_attn.q_proj.weight", 64, 64) for layer in range(2)]
    assert queries[0].std().item() == pytest.approx(QUERY_KEY_GAIN * 64**-0.5, rel=0.1)
    assert not torch.equal(*queries)


def test_a_model_is_named_by_its_folder_or_hub_id(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text("{}")
    assert model_name(str(tmp_path / "Qwen3-8B")) == "Qwen3-8B"
    assert model_name("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_every_case_finds_room_in_a_launch() -> None:
    """Prompts that arrive would otherwise wait until the streams beside them have ended."""
    kinds = {case.row.kind: case.num_seqs for case in all_cases(Sizes(streams=(1,)))}
    assert (kinds["arrivals"], kinds["burst"], kinds["streams"]) == (76, 8, 1)


def test_a_run_on_the_cpu(tmp_path: Path) -> None:
    """Two streams, prompts behind a prefix, prompts that arrive, and a cache service that stands still."""
    out = tmp_path / "serving.json"
    kinds = ("streams", "burst", "arrivals", "stopped")
    command = ("-m", "benchmarks.bench_serving", "--device", "cpu", "--quick", "--out", str(out), "--only", *kinds)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STEMCACHE_")}
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    report: dict[str, Any] = json.loads(out.read_text())
    assert (report["device"], report["model"]) == ("cpu", "random")
    assert report["settings"] == {"STEMCACHE_WORKER_MAX_NUM_SEQS": "64"}
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["streams_2_66", "streams_1_66", "burst_cold", "burst_cached", "arrivals", "stopped"]
    for row in rows.values():
        assert row["failures"] == [] and not row["skipped"]
        assert row["alone"] == row["compared"] >= row["streams"]
        assert row["ttft_ms_p50"] > 0
    steady = ("wall_ms", "tokens_per_s", "itl_ms_p50", "itl_ms_p99")
    # On a machine that does much else the streams may have ended before the first scrape.
    assert any(all(rows[f"streams_{num}_66"][key] for key in steady) for num in (2, 1))
    assert all(rows[f"streams_{num}_66"]["detail"]["tokens_per_message"] >= 1 for num in (2, 1))
    assert rows["burst_cold"]["cached_tokens"] == rows["burst_cached"]["cached_tokens"] == QUICK.prefix
    assert rows["arrivals"]["detail"]["quiet_itl_ms_p50"] > 0
    assert rows["stopped"]["silence_ms_max"] > 0
    assert "2 right, 2 alone" in ended.stdout
