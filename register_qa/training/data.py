"""Packed training sequences: one register, and as many question and answer pairs behind it as there is room for.

Knows no model. A batch is a pure function of seed, stage and step, so workers may make them in any order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from register_qa.facts import Split
from register_qa.questions import Kind, Question, draw_questions
from register_qa.register import MIN_HOLDINGS, Register, draw_register
from register_qa.training.curriculum import Stage
from register_qa.training.tokenizer import Encoder

NO_LABEL = -100
TOKENS_PER_HOLDING = 27
TOKENS_PER_PAIR = 22
# Small registers have more keys for each holding.
TOKENS_TO_SPARE = 60
# The register takes this share of a sequence, the pairs the rest.
REGISTER_SHARES = (0.35, 0.87)


class Batch(NamedTuple):
    """Int64 [sequences, length] each: the tokens, and what follows them within the register or within an answer.

    An answer's last label is the end token, which never stands in `tokens`: as in a conversation, the next question
    follows the full stop.
    """

    tokens: torch.Tensor
    register_labels: torch.Tensor
    answer_labels: torch.Tensor


class PackedBatches(torch.utils.data.Dataset[Batch]):
    """Item `step` is that step's batch, if it is of this stage."""

    def __init__(self, tokenizer: Tokenizer, seed: int, stage: Stage) -> None:
        self._tokenizer_json = tokenizer.to_str()
        self._seed = seed
        self._stage = stage
        self._encoder: Encoder | None = None

    def __getitem__(self, step: int) -> Batch:
        if self._encoder is None:
            self._encoder = Encoder(Tokenizer.from_str(self._tokenizer_json))
        rows = [
            packed_row(self._encoder, random.Random(f"row {self._seed} {step} {row}"), self._stage)
            for row in range(self._stage.sequences)
        ]
        return Batch(*(torch.tensor(column) for column in zip(*rows, strict=True)))


def packed_row(encoder: Encoder, rng: random.Random, stage: Stage) -> tuple[list[int], list[int], list[int]]:
    """Tokens, register labels and answer labels of one sequence, each as long as the stage says."""
    length = stage.length
    budget = int(length * rng.uniform(*REGISTER_SHARES))
    holdings = max(MIN_HOLDINGS, (budget - TOKENS_TO_SPARE) // TOKENS_PER_HOLDING)
    register = draw_register(rng.getrandbits(62), split=Split.TRAIN, holdings=holdings)
    tokens = encoder.register(register)
    register_labels = [*tokens[1:], NO_LABEL]
    answer_labels = [NO_LABEL] * len(tokens)
    for asked, answer in _pairs(encoder, register, rng, (length - len(tokens)) // TOKENS_PER_PAIR + 1, stage.recited):
        if len(tokens) + len(asked) + len(answer) > length:
            break
        tokens += asked + answer
        answer_labels += [NO_LABEL] * (len(asked) - 1) + [*answer, encoder.end]
    padding = length - len(tokens)
    tokens += [encoder.end] * padding
    register_labels += [NO_LABEL] * (length - len(register_labels))
    answer_labels += [NO_LABEL] * (length - len(answer_labels))
    return tokens, register_labels, answer_labels


def _pairs(
    encoder: Encoder, register: Register, rng: random.Random, count: int, recited: float
) -> Iterator[tuple[list[int], list[int]]]:
    """Questions and answers, and among them lines of the register: a line's subject asks for the rest of it."""
    subjects = rng.sample(list(register.places), len(register.places))
    for question in _questions(register, rng, count):
        if rng.random() < recited:
            fact = subjects.pop()
            line = register.places[fact].line
            start, subject, rest = register.text[line.start : line.end].partition(fact.subject)
            yield encoder.text(start + subject), encoder.text(rest)
        else:
            yield encoder.question(question), encoder.answer(question)


def _questions(register: Register, rng: random.Random, count: int) -> list[Question]:
    """Every kind as often, as far as the register goes, in any order."""
    drawn: list[Question] = []
    each = max(1, -(-count // len(Kind)))
    for kind in Kind:
        available = len(register.room_keys) if kind is Kind.HOOK else len(register.holdings)
        drawn += draw_questions(register, rng.getrandbits(62), min(each, available), [kind])
    rng.shuffle(drawn)
    return drawn
