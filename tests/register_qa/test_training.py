"""The trainer on a CPU: batches are what they say, loss falls, a stopped run goes on as if it had not stopped."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from register_qa import Kind, Split, draw_questions, draw_register
from register_qa.training.curriculum import CURRICULA, Stage, rate_share
from register_qa.training.data import NO_LABEL, REGISTER_SHARES, PackedBatches, holdings_of, packed_row
from register_qa.training.evaluate import Trial, evaluate
from register_qa.training.folder import read_tokenizer, read_weights, write_folder
from register_qa.training.llama import LlamaArchitecture
from register_qa.training.tokenizer import Encoder
from register_qa.training.train import Plan, Progress, Trainer
from worker_service.model.config import read_model_spec
from worker_service.model.decoder import expected_shapes

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SMALL = LlamaArchitecture(
    vocab_size=2048,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=1024,
    rope_theta=10000.0,
)


def trainer(tokenizer: Tokenizer, steps: int, *, rate: float = 1e-2, report_every: int = 10) -> Trainer:
    torch.manual_seed(0)
    plan = Plan("short", steps, rate, report_every=report_every, compiled=False)
    return Trainer(SMALL.build(), tokenizer, plan, CPU)


def silent(progress: Progress) -> None:
    del progress


@pytest.mark.parametrize("length", [160, 1000, 4096])
@pytest.mark.parametrize("recited", [0.0, 0.5])
def test_a_row_is_one_register_and_its_answers(tokenizer: Tokenizer, length: int, recited: float) -> None:
    encoder = Encoder(tokenizer)
    columns = packed_row(encoder, random.Random(1), Stage(length, 1, recited))
    assert {len(column) for column in columns} == {length}
    tokens, register_labels, answer_labels = columns[:3]
    text = tokenizer.decode(tokens)
    answers: list[str] = []
    answer: list[int] = []
    for token, label in zip(tokens, answer_labels, strict=True):
        if label == encoder.end:
            answers.append(tokenizer.decode(answer))
            answer = []
        elif label != NO_LABEL:
            answer.append(label)
        assert token != encoder.end or label == NO_LABEL
    assert len(answers) >= 3
    assert all(answer in text for answer in answers)
    if not recited:
        assert len(answers) == text.count("Answer:")
        assert all(f"Answer:{answer}" in text for answer in answers)
    for place, label in enumerate(register_labels):
        assert label in (NO_LABEL, tokens[place + 1] if place + 1 < length else NO_LABEL)
        assert label == NO_LABEL or answer_labels[place] == NO_LABEL


@pytest.mark.parametrize("stage", dict.fromkeys(stage for stages in CURRICULA.values() for stage in stages))
def test_rows_of_every_stage_are_as_long_as_it_says(tokenizer: Tokenizer, stage: Stage) -> None:
    encoder = Encoder(tokenizer)
    for seed in range(max(5, 60_000 // stage.length)):
        assert {len(column) for column in packed_row(encoder, random.Random(seed), stage)} == {stage.length}


@pytest.mark.parametrize("stage", CURRICULA["full"])
def test_a_score_asks_about_registers_that_the_stage_has(tokenizer: Tokenizer, stage: Stage) -> None:
    holdings = holdings_of(stage, max(REGISTER_SHARES))
    registers = [draw_register(seed, split=Split.EVAL, holdings=holdings) for seed in range(4)]
    assert max(len(Encoder(tokenizer).register(register)) for register in registers) <= stage.length


@pytest.mark.parametrize("length", [160, 1000, 4096])
def test_guidance_points_at_what_is_copied_and_names_its_subject(tokenizer: Tokenizer, length: int) -> None:
    columns = packed_row(Encoder(tokenizer), random.Random(2), Stage(length, 1, 0.5))
    tokens, _, answers, first_words, last_words, sources = columns
    asking = [place for place in range(length) if sources[place] != NO_LABEL]
    assert len(asking) >= 3
    for place in asking:
        source = sources[place]
        assert source < place
        assert answers[place] == tokens[source] == tokens[place + 1]
        # Who asks tells of the subject of which the source tells.
        assert (first_words[place], last_words[place]) == (first_words[source], last_words[source])
        assert first_words[place] != NO_LABEL


@pytest.mark.parametrize("recited", [0.0, 0.5])
def test_no_row_tells_a_held_out_fact(tokenizer: Tokenizer, recited: float) -> None:
    """A row's register is drawn from the training split: the text of no held-out line is ever in it."""
    held_out = draw_register(0, split=Split.EVAL, holdings=200)
    lines = {held_out.text[place.line.start : place.line.end] for place in held_out.places.values()}
    for seed in range(5):
        text = tokenizer.decode(packed_row(Encoder(tokenizer), random.Random(seed), Stage(4096, 1, recited))[0])
        assert not any(line in text for line in lines)


def test_batches_depend_on_seed_and_step_alone(tokenizer: Tokenizer) -> None:
    stage = Stage(320, 2)
    again = PackedBatches(tokenizer, 0, stage)
    one = PackedBatches(tokenizer, 0, stage)
    later = again[3]
    assert torch.equal(one[3].tokens, later.tokens)
    assert not torch.equal(one[2].tokens, later.tokens)
    assert not torch.equal(PackedBatches(tokenizer, 1, stage)[3].tokens, later.tokens)


@pytest.mark.parametrize("curriculum", CURRICULA)
def test_sequences_grow_and_the_last_stage_has_no_end(curriculum: str) -> None:
    stages = CURRICULA[curriculum]
    lengths = [stage.length for stage in stages]
    assert lengths == sorted(lengths)
    assert all(stage.pass_mark <= 1 for stage in stages[:-1])
    assert stages[-1].pass_mark > 1


def test_the_rate_rises_stays_and_falls() -> None:
    shares = [rate_share(step, step / 1000) for step in range(1000)]
    assert shares[:100] == sorted(shares[:100])
    assert set(shares[100:650]) == {1.0}
    assert shares[650:] == sorted(shares[650:], reverse=True)
    assert 0 < shares[0] < 0.05
    assert 0 < shares[-1] < 0.05


def test_loss_falls(tokenizer: Tokenizer) -> None:
    seen: list[Progress] = []
    trainer(tokenizer, 20, rate=0.1, report_every=5).run(seen.append)
    assert [progress.step for progress in seen] == [5, 10, 15, 20]
    assert seen[-1].answer_loss < 0.7 * seen[0].answer_loss
    assert seen[-1].register_loss < 0.8 * seen[0].register_loss
    assert all(set(progress.score.asked) == set(Kind) for progress in seen)


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole = trainer(tokenizer, 8)
    whole.run(silent)
    stopped = trainer(tokenizer, 8)
    stopped.run(silent, until=3)
    assert stopped.step == 3
    stopped.save(tmp_path / "checkpoint.pt")
    torch.manual_seed(5)
    resumed = trainer(tokenizer, 8)
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.run(silent)
    assert resumed.step == 8
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_the_folder_is_what_the_worker_expects(tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SMALL.build()
    write_folder(tmp_path, SMALL, model, tokenizer)
    config = read_model_spec(tmp_path)
    assert config.eos_token_ids == (Encoder(tokenizer).end,)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    assert shapes == expected_shapes(config)
    assert read_tokenizer(tmp_path).to_str() == tokenizer.to_str()
    again = SMALL.build().to(torch.bfloat16)
    read_weights(tmp_path, again)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight.to(torch.bfloat16), again.state_dict()[name])
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["dtype"] == "bfloat16"


class Knowing(torch.nn.Module):
    """"""

    def __init__(self, encoder: Encoder, trial: Trial, unknown: Kind) -> None:
        super().__init__()
        self._next: dict[tuple[int, ...], int] = {}
        for seed in range(trial.first_seed, trial.first_seed + trial.registers):
            register = draw_register(seed, split=Split.EVAL, holdings=trial.holdings)
            for question in draw_questions(register, 0, trial.questions_per_kind * len(Kind)):
                row = [*encoder.register(register), *encoder.question(question)]
                for token in [*encoder.answer(question), encoder.end]:
                    # Wrong in one place only: at the end.
                    wrong = question.kind is unknown and token == encoder.end
                    self._next[tuple(row)] = 7 if wrong else token
                    row.append(token)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, 2048)
        for row, line in enumerate(tokens.tolist()):
            for place in range(len(line)):
                logits[row, place, self._next.get(tuple(line[: place + 1]), 9)] = 1.0
        return logits


def test_marking_is_exact_and_by_kind(tokenizer: Tokenizer) -> None:
    encoder = Encoder(tokenizer)
    trial = Trial(registers=2, holdings=4, questions_per_kind=2)
    score = evaluate(Knowing(encoder, trial, Kind.YEAR), encoder, trial, CPU)
    assert {kind: score.accuracy(kind) for kind in Kind} == {kind: float(kind is not Kind.YEAR) for kind in Kind}
    assert sum(score.asked.values()) == 2 * 2 * len(Kind)
