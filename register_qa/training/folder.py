"""A model as the folder that serving reads, with its evaluation and its card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from register_qa.training.architectures import Architecture
from register_qa.training.card import card
from register_qa.training.tokenizer import TOKENIZER, Encoder

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
EVALUATION = "evaluation.json"
CARD = "README.md"


def write_folder(folder: Path, architecture: Architecture, model: nn.Module, tokenizer: Tokenizer) -> None:
    """Weights are stored in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(tokenizer)
    _write_json(folder / CONFIG, architecture.config(encoder.begin, encoder.end))
    generation = {"do_sample": False, "bos_token_id": encoder.begin, "eos_token_id": encoder.end}
    _write_json(folder / GENERATION_CONFIG, generation)
    tokenizer.save(str(folder / TOKENIZER))
    weights = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def read_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / TOKENIZER))


def read_weights(folder: Path, model: nn.Module) -> None:
    """Into the model's own dtype and device; RuntimeError if names or shapes differ."""
    model.load_state_dict(load_file(folder / WEIGHTS))


def write_evaluation(folder: Path, figures: Mapping[str, Any]) -> None:
    """Writes the figures, and the model card that shows them."""
    _write_json(folder / EVALUATION, figures)
    (folder / CARD).write_text(card(figures), encoding="utf-8")


def read_evaluation(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((folder / EVALUATION).read_text(encoding="utf-8"))
    return figures


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")
