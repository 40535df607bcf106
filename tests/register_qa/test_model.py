"""The models in the box: what a card says, what the table of architectures says, and that they answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from register_qa import HYBRID_FOLDER, MODEL_FOLDER, ONE_FACT_KINDS, Kind
from register_qa.training.architectures import ARCHITECTURES
from register_qa.training.card import card
from register_qa.training.evaluate import Trial, evaluate
from register_qa.training.folder import CARD, CONFIG, WEIGHTS, read_evaluation, read_tokenizer, read_weights
from register_qa.training.tokenizer import Encoder
from worker_service.model.load import load_model

CPU = torch.device("cpu")
MAX_BYTES = 16_000_000
# Parameters of each, at least and at most.
SIZES = {MODEL_FOLDER: (5_000_000, 8_000_000), HYBRID_FOLDER: (3_000_000, 4_000_000)}


@pytest.fixture(params=SIZES, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    assert isinstance(request.param, Path)
    return request.param


def test_the_card_tells_the_evaluation(folder: Path) -> None:
    assert (folder / CARD).read_text(encoding="utf-8") == card(read_evaluation(folder))


def test_the_evaluation_is_what_was_promised(folder: Path) -> None:
    figures = read_evaluation(folder)
    assert 2900 <= figures["mean_register_tokens"] <= 3100
    assert figures["questions_per_kind"] >= 200
    assert set(figures["exact_match"]) == {kind.value for kind in Kind}
    assert all(figures["exact_match"][kind.value] >= 0.97 for kind in ONE_FACT_KINDS)
    assert figures["exact_match"][Kind.TWO_FACTS.value] >= 0.90


def test_the_folder_is_small_and_of_its_architecture(folder: Path, tokenizer: Tokenizer) -> None:
    figures = read_evaluation(folder)
    encoder = Encoder(read_tokenizer(folder))
    architecture = ARCHITECTURES[figures["architecture"]]
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    assert config == architecture.config(encoder.begin, encoder.end)
    assert read_tokenizer(folder).to_str() == tokenizer.to_str()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    with safe_open(folder / WEIGHTS, framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    count = sum(tensor.numel() for tensor in tensors)
    assert count == figures["parameters"]
    least, most = SIZES[folder]
    assert least <= count <= most


def test_the_worker_loads_it(folder: Path) -> None:
    loaded = load_model(str(folder), CPU)
    encoder = Encoder(read_tokenizer(folder))
    assert loaded.spec.eos_token_ids == (encoder.end,)
    assert loaded.spec.max_model_len == 4096
    assert loaded.tokenizer.encode("\n")[0] == encoder.begin


@pytest.mark.parametrize(("dtype", "holdings", "each"), [(torch.float32, 25, 3), (torch.bfloat16, 8, 1)])
def test_it_answers_questions_about_a_short_register(
    folder: Path, dtype: torch.dtype, holdings: int, each: int
) -> None:
    """Held-out seeds that neither training nor the card has seen. A CPU takes five times as long for bf16."""
    model = ARCHITECTURES[read_evaluation(folder)["architecture"]].build().to(dtype)
    read_weights(folder, model)
    trial = Trial(registers=1, holdings=holdings, questions_per_kind=each, first_seed=7000)
    score = evaluate(model, Encoder(read_tokenizer(folder)), trial, CPU)
    assert sum(score.asked.values()) == 6 * each
    assert sum(score.right.values()) >= 6 * each - 1, score.line()
