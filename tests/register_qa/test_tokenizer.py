"""The tokenizer: regular numbers, any text there and back, and prefixes whose tokens do not hang on what follows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from register_qa import Split, draw_questions, draw_register
from register_qa.training.tokenizer import BEGIN, END, VOCABULARY, Encoder, train_tokenizer
from tests.register_qa.conversation import Turn, prompt_of
from worker_service.model.tokenizer import Tokenizer as Served


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Served:
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return Served(path)


def test_training_again_gives_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    assert train_tokenizer().to_str() == tokenizer.to_str()


def test_the_vocabulary_is_full(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert (tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)) == (0, 1)


def test_the_worker_reads_it(served: Served) -> None:
    text = draw_register(1, split=Split.EVAL, holdings=8).text
    ids = served.encode(text)
    assert ids[0] == 0
    assert served.decode(ids) == text
    assert served.detokenizer().add(ids) == text


@given(st.text())
def test_any_text_there_and_back(served: Served, text: str) -> None:
    for name in (BEGIN, END):
        text = text.replace(name, "")
    assert served.decode(served.encode(text)) == text


def test_numbers_are_pairs_of_digits(tokenizer: Tokenizer) -> None:
    for number, pieces in (("7", 1), ("14", 1), ("99", 1), ("1742", 2), ("2000", 2)):
        ids = tokenizer.encode(f" {number}", add_special_tokens=False).ids
        assert len(ids) == pieces, number


def test_words_of_the_task_are_single_tokens(tokenizer: Tokenizer) -> None:
    register = draw_register(1, split=Split.EVAL, holdings=115)
    words = {word for holding in register.holdings for word in (*holding.name.split(), *holding.room.split())}
    assert all(len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1 for word in words)


def test_a_prefix_keeps_its_tokens_whatever_follows(tokenizer: Tokenizer) -> None:
    encoder = Encoder(tokenizer)
    register = draw_register(2, split=Split.EVAL, holdings=16)
    first, second = draw_questions(register, 0, 2)
    prefix = encoder.register(register)
    joined = [
        *prefix,
        *encoder.question(first),
        *encoder.answer(first),
        *encoder.question(second),
    ]
    assert tokenizer.encode(register.text).ids == prefix
    assert tokenizer.encode(prompt_of(register, second, [Turn(first, first.answer)])).ids == joined


@pytest.mark.parametrize(("holdings", "low", "high"), [(20, 500, 560), (115, 2900, 3100), (134, 3400, 3600)])
def test_registers_are_as_long_as_said(tokenizer: Tokenizer, holdings: int, low: int, high: int) -> None:
    lengths = [
        len(Encoder(tokenizer).register(draw_register(seed, split=Split.EVAL, holdings=holdings))) for seed in range(5)
    ]
    assert low <= min(lengths) <= max(lengths) <= high, lengths


def test_a_tokenizer_without_its_special_tokens_is_named() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        Encoder(Tokenizer(models.BPE()))
