"""Packed training sequences: one register, and as many question and answer pairs behind it as there is room for.

A batch is a pure function of seed, stage and step, so workers may make them in any order.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from register_qa.facts import Split
from register_qa.questions import Kind, Question, draw_questions
from register_qa.register import MIN_HOLDINGS, Register, Span, draw_register
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
    """Int64 [sequences, length] each: the tokens, and labels, NO_LABEL where there is none.

    `register` and `answers` are what follows a token, within the register or within an answer. An answer's last label
    is the end token, which is never in `tokens`: as in a conversation, the next question follows the full stop.
    `first_words` and `last_words` are the two words of the subject that a token belongs to. `sources` is the place in
    the register of the token that must be copied next.
    """

    tokens: torch.Tensor
    register: torch.Tensor
    answers: torch.Tensor
    first_words: torch.Tensor
    last_words: torch.Tensor
    sources: torch.Tensor


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


# From which character on a text is about which subject; the last word of the subject's name is the first token that
# knows.
Subjects = Sequence[tuple[int, str | None]]


class Copied(NamedTuple):
    """The value at `start` of an answer is copied from `source`, a span of the register."""

    start: int
    source: Span


class Pair(NamedTuple):
    """What is given and what is to be written behind it, of which subjects they tell, and what is copied."""

    asked: str
    asked_subjects: Subjects
    answer: str
    answer_subjects: Subjects
    copied: Sequence[Copied]


class Row:
    """One sequence in the making: the columns of a batch, as lists that are always equally long."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.tokens = [encoder.begin]
        self.register = [NO_LABEL]
        self.answers = [NO_LABEL]
        self.first_words = [NO_LABEL]
        self.last_words = [NO_LABEL]
        self.sources = [NO_LABEL]
        self._register_ends: list[int] = []

    def columns(self) -> tuple[list[int], ...]:
        return self.tokens, self.register, self.answers, self.first_words, self.last_words, self.sources

    def add_register(self, register: Register) -> None:
        ids, self._register_ends = self._add(register.text, _subjects_of_lines(register))
        self.register = [*ids, NO_LABEL]
        self.answers += [NO_LABEL] * len(ids)

    def add_pair(self, pair: Pair, length: int) -> bool:
        """False, and nothing is added, if the row would become longer than `length`."""
        before = len(self.tokens)
        asked, _ = self._add(pair.asked, pair.asked_subjects)
        answer, ends = self._add(pair.answer, pair.answer_subjects)
        self.register += [NO_LABEL] * (len(asked) + len(answer))
        self.answers += [NO_LABEL] * (len(asked) - 1) + [*answer, self._encoder.end]
        for copied in pair.copied:
            self._add_sources(copied, before + len(asked), ends)
        fits = len(self.tokens) <= length
        if not fits:
            for column in self.columns():
                del column[before:]
        return fits

    def pad(self, length: int) -> None:
        missing = length - len(self.tokens)
        self.tokens += [self._encoder.end] * missing
        for column in self.columns()[1:]:
            column += [NO_LABEL] * missing

    def _add_sources(self, copied: Copied, answer_start: int, ends: list[int]) -> None:
        """A token is copied at the place before it."""
        span = copied.source
        source = bisect_right(self._register_ends, span.start) + 1
        first = answer_start + bisect_right(ends, copied.start)
        last = answer_start + bisect_right(ends, copied.start + span.end - span.start)
        for offset in range(last - first):
            self.sources[first + offset - 1] = source + offset

    def _add(self, text: str, subjects: Subjects) -> tuple[list[int], list[int]]:
        """The tokens, and where in the text each ends."""
        ids, ends = self._encoder.ids_and_ends(text)
        coming = iter([*subjects, (len(text) + 1, None)])
        words: tuple[int, int] = (NO_LABEL, NO_LABEL)
        start, following = next(coming)
        for end in ends:
            while end >= start:
                words = self._words(following)
                start, following = next(coming)
            self.first_words.append(words[0])
            self.last_words.append(words[1])
        self.tokens += ids
        self.sources += [NO_LABEL] * len(ids)
        return ids, ends

    def _words(self, subject: str | None) -> tuple[int, int]:
        if subject is None:
            return NO_LABEL, NO_LABEL
        return self._encoder.name(subject)


def packed_row(encoder: Encoder, rng: random.Random, stage: Stage) -> tuple[list[int], ...]:
    """The columns of one sequence, each as long as the stage says."""
    holdings = holdings_of(stage, rng.uniform(*REGISTER_SHARES))
    register = draw_register(rng.getrandbits(62), split=Split.TRAIN, holdings=holdings)
    row = Row(encoder)
    row.add_register(register)
    for pair in _pairs(register, rng, (stage.length - len(row.tokens)) // TOKENS_PER_PAIR + 1, stage.recited):
        if not row.add_pair(pair, stage.length):
            break
    row.pad(stage.length)
    return row.columns()


def holdings_of(stage: Stage, share: float) -> int:
    """Returns how many holdings a register has that takes this share of the stage's sequences."""
    return max(MIN_HOLDINGS, (int(stage.length * share) - TOKENS_TO_SPARE) // TOKENS_PER_HOLDING)


def _subjects_of_lines(register: Register) -> Subjects:
    lines = {place.line.start: (place.line, fact.subject) for fact, place in register.places.items()}
    subjects: list[tuple[int, str | None]] = []
    for start, (line, subject) in sorted(lines.items()):
        name_end = register.text.index(subject, start, line.end) + len(subject)
        subjects += [(start + 1, None), (name_end, subject)]
    return subjects


def _pairs(register: Register, rng: random.Random, count: int, recited: float) -> Iterator[Pair]:
    """Questions and answers, and among them lines of the register: a line's subject asks for the rest of it."""
    # A holding's line is there once for each of its facts: lines with more facts are recited more often.
    lines = rng.sample([(fact.subject, place.line) for fact, place in register.places.items()], len(register.places))
    values: dict[Span, list[Span]] = {}
    for place in register.places.values():
        values.setdefault(place.line, []).append(place.value)
    for question in _questions(register, rng, count):
        if lines and rng.random() < recited:
            subject, line = lines.pop()
            start, _, rest = register.text[line.start : line.end].partition(subject)
            skipped = line.start + len(start + subject)
            copied = [Copied(value.start - skipped, value) for value in values[line]]
            yield Pair(start + subject, [(len(start + subject), subject)], rest, [(0, subject)], copied)
        else:
            yield _pair_of(question)


def _pair_of(question: Question) -> Pair:
    """The answer is about the first fact's subject; behind the name of the room, about the room."""
    answer = f" {question.answer}"
    subject = question.facts[0].fact.subject
    known: Subjects = [(question.text.index(subject) + len(subject), subject)]
    told: list[tuple[int, str | None]] = [(0, subject)]
    for later in question.facts[1:]:
        room = later.fact.subject
        told.append((answer.index(room) + len(room), room))
    copied = [Copied(answer.index(f" {asked.fact.value}") + 1, asked.place.value) for asked in question.facts]
    return Pair(question.text, known, answer, told, copied)


def _questions(register: Register, rng: random.Random, count: int) -> list[Question]:
    """Every kind as often, as far as the register goes, in any order."""
    drawn: list[Question] = []
    each = max(1, -(-count // len(Kind)))
    for kind in Kind:
        available = len(register.room_keys) if kind is Kind.HOOK else len(register.holdings)
        drawn += draw_questions(register, rng.getrandbits(62), min(each, available), [kind])
    rng.shuffle(drawn)
    return drawn
