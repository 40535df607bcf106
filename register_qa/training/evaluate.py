"""Exact match of a model in training on held-out registers, kind by kind.

An answer counts when every token of it, the end token included, is the model's first choice behind the right tokens
before it: that is what greedy decoding writes, and it takes one forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from register_qa.facts import Split
from register_qa.questions import Kind, Question, draw_questions
from register_qa.register import Register, draw_register
from register_qa.training.data import NO_LABEL
from register_qa.training.tokenizer import Encoder

TOKENS_PER_FORWARD = 65536


@dataclass(frozen=True, slots=True)
class Trial:
    """What to ask: `registers` held-out registers of `holdings` each, and `questions_per_kind` about each."""

    registers: int
    holdings: int
    questions_per_kind: int
    first_seed: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """Right answers and questions by kind, and how long the registers were on average, in tokens."""

    right: Mapping[Kind, int]
    asked: Mapping[Kind, int]
    register_tokens: float

    def accuracy(self, kind: Kind) -> float:
        return self.right[kind] / self.asked[kind]

    def mean(self) -> float:
        """Of the kinds' accuracies."""
        return sum(map(self.accuracy, Kind)) / len(Kind)

    def line(self) -> str:
        return " ".join(f"{kind.value}={self.accuracy(kind):.3f}" for kind in Kind)


@torch.no_grad()
def evaluate(model: nn.Module, encoder: Encoder, trial: Trial, device: torch.device) -> Score:
    """In the model's present dtype; under autocast if the caller has it."""
    model.eval()
    right: Counter[Kind] = Counter()
    asked: Counter[Kind] = Counter()
    lengths = []
    for register in _registers(trial):
        prefix = encoder.register(register)
        lengths.append(len(prefix))
        questions = draw_questions(register, 0, trial.questions_per_kind * len(Kind))
        for question, correct in _answered(model, encoder, prefix, questions, device):
            asked[question.kind] += 1
            right[question.kind] += correct
    model.train()
    return Score(right, asked, sum(lengths) / len(lengths))


def _registers(trial: Trial) -> Iterator[Register]:
    for seed in range(trial.first_seed, trial.first_seed + trial.registers):
        yield draw_register(seed, split=Split.EVAL, holdings=trial.holdings)


def _answered(
    model: nn.Module, encoder: Encoder, prefix: list[int], questions: tuple[Question, ...], device: torch.device
) -> Iterator[tuple[Question, bool]]:
    at_once = max(1, TOKENS_PER_FORWARD // (len(prefix) + 64))
    for start in range(0, len(questions), at_once):
        group = questions[start : start + at_once]
        tokens, labels = _rows(encoder, prefix, group)
        chosen = model(tokens.to(device))[:, len(prefix) :].argmax(-1).cpu()
        wanted = labels[:, len(prefix) :]
        correct = ((chosen == wanted) | (wanted == NO_LABEL)).all(-1)
        yield from zip(group, correct.tolist(), strict=True)


def _rows(encoder: Encoder, prefix: list[int], questions: tuple[Question, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each question alone behind the register, with its answer."""
    pairs = [(encoder.question(question), encoder.answer(question)) for question in questions]
    length = len(prefix) + max(len(asked) + len(answer) for asked, answer in pairs)
    tokens = torch.full((len(pairs), length), encoder.end)
    labels = torch.full((len(pairs), length), NO_LABEL)
    for row, (asked, answer) in enumerate(pairs):
        line = [*prefix, *asked, *answer]
        tokens[row, : len(line)] = torch.tensor(line)
        labels[row, len(line) - len(answer) - 1 : len(line)] = torch.tensor([*answer, encoder.end])
    return tokens, labels
