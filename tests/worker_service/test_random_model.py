"""The seeded demo model: the same bytes for the same seed, long prompts, readable text that varies, little rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cli.random_model import READABLE, make_random_model
from tests.worker_service.model_kit import CPU, Bench, Part, random_tokens
from worker_service.model.digest import model_digest
from worker_service.model.load import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make_random_model(folder, seed=3)
    return folder


def test_the_seed_decides_the_bytes(folder: Path, tmp_path: Path) -> None:
    make_random_model(tmp_path / "same", seed=3)
    make_random_model(tmp_path / "other", seed=4)
    assert model_digest(tmp_path / "same") == model_digest(folder)
    assert model_digest(tmp_path / "other") != model_digest(folder)


def test_long_prompts_fit(folder: Path) -> None:
    loaded = load_model(str(folder), CPU)
    assert loaded.spec.max_model_len >= 16_000
    assert loaded.tokenizer.vocab_size == loaded.spec.vocab_size


@pytest.mark.parametrize("prompt", ["Hello", "What is a prefix cache?", "Tell me about radix trees. " * 4])
def test_greedy_text_is_readable_and_varies(folder: Path, prompt: str) -> None:
    loaded = load_model(str(folder), CPU)
    bench = Bench(folder)
    sequence = bench.sequence(loaded.tokenizer.encode(prompt), range(1, 20))
    first, start = 0, len(sequence.tokens)
    for _ in range(64):
        end = len(sequence.tokens)
        sequence.tokens.extend(bench.run(Part(sequence, first, end)).token_ids)
        first = end
    text = loaded.tokenizer.decode(sequence.tokens[start:])
    assert set(text) <= set(READABLE)
    assert len(set(text)) >= 8
    assert len({text[place : place + 4] for place in range(61)}) >= 30


def test_rounding_is_not_magnified(folder: Path) -> None:
    """Cached and cold runs cut a prompt differently: more than rounding between their logits would show in the text."""
    bench = Bench(folder)
    tokens = random_tokens(300, 1)
    whole = bench.all_logits(Part(bench.sequence(tokens, range(1, 20)), 0, 300))
    for chunk in (1, 100):
        chunked = bench.chunked_logits(bench.sequence(tokens, range(20, 39)), chunk)
        assert (chunked - whole).abs().mean() < 5e-5
        assert torch.equal(chunked.argmax(-1), whole.argmax(-1))
