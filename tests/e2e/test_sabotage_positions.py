"""A question that stands one position too far: its logits change, which a figure of accuracy might forgive.

Turned by its position, a key says how far away it is. So a shift of everything is invisible, and one of the question
alone is not.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import tokenizers
import torch

from register_qa import MODEL_FOLDER, Split, draw_questions, draw_register
from tests.worker_service.model_kit import NUM_PAGES, PAGE, Bench, PagedTokens, Part
from worker_service.model.tokenizer import TOKENIZER

REGISTER = draw_register(77, split=Split.EVAL, holdings=12)
QUESTION = draw_questions(REGISTER, 1, 1)[0]
# What other sums of the same numbers differ by, and what a wrong position does at the least.
ROUNDING, NOTICED = 1e-3, 0.02


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(MODEL_FOLDER)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL_FOLDER / TOKENIZER))
    ids = tokenizer.encode(REGISTER.text + QUESTION.text).ids
    assert PAGE * 10 < len(ids) <= PAGE * NUM_PAGES
    return list(ids)


def logits(bench: Bench, sequence: PagedTokens, part: tuple[int, int], shift: int) -> torch.Tensor:
    """Of the last token of this part, whose positions are all off by `shift`."""
    batch = bench.batch(Part(sequence, *part), num_decode=0)
    return bench.runner.logits(replace(batch, positions=array("i", [at + shift for at in batch.positions])))


def answer_logits(bench: Bench, tokens: Sequence[int], register_shift: int, question_shift: int) -> torch.Tensor:
    """The register's pages are there already when the question comes, as behind a hit."""
    sequence = bench.sequence(tokens, range(1, NUM_PAGES + 1))
    cut = (len(tokens) - 20) // PAGE * PAGE
    logits(bench, sequence, (0, cut), register_shift)
    return logits(bench, sequence, (cut, len(tokens)), question_shift)


def test_a_question_shifted_by_one_position_has_other_logits(bench: Bench, tokens: list[int]) -> None:
    right = answer_logits(bench, tokens, 0, 0)
    assert torch.equal(answer_logits(bench, tokens, 0, 0), right)
    for shift in (1, -1):
        assert (answer_logits(bench, tokens, 0, shift) - right).abs().max() > NOTICED


def test_a_shift_of_everything_is_invisible(bench: Bench, tokens: list[int]) -> None:
    right = answer_logits(bench, tokens, 0, 0)
    assert (answer_logits(bench, tokens, 1, 1) - right).abs().max() < ROUNDING
