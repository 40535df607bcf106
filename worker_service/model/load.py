"""A model folder (or hub id) made ready to serve: config, weights, tokenizer, digest, and the shape of its pages.

Knows no pool size and no service.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from worker_service.gpu.kv_pages import KvShape
from worker_service.model.config import ModelConfig, ModelError, read_model_config
from worker_service.model.device import pick_dtype
from worker_service.model.llama import Llama
from worker_service.model.tokenizer import TOKENIZER, Tokenizer
from worker_service.model.weights import load_weights, model_digest, resolve_folder


class LoadedModel(NamedTuple):
    """`digest` is what the model is (32 bytes), whatever its folder is called."""

    config: ModelConfig
    model: Llama
    tokenizer: Tokenizer
    digest: bytes


def load_model(
    model: str, device: torch.device, *, revision: str | None = None, dtype: str = "auto", max_model_len: int = 0
) -> LoadedModel:
    """Cheap checks first, so that a bad folder is told before gigabytes are read. max_model_len 0 = the config's."""
    folder = resolve_folder(model, revision)
    config = _limited(read_model_config(folder), max_model_len)
    if not (folder / TOKENIZER).is_file():
        raise ModelError(TOKENIZER, "is not in the model folder")
    tokenizer = Tokenizer(folder / TOKENIZER)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            TOKENIZER, f"has {tokenizer.vocab_size} tokens, but the model's vocab_size is {config.vocab_size}"
        )
    tensors = load_weights(folder, config, pick_dtype(dtype, config.dtype, device), device)
    return LoadedModel(config, Llama(config, tensors, device), tokenizer, model_digest(folder))


def kv_shape(config: ModelConfig, dtype: torch.dtype, page_tokens: int) -> KvShape:
    """A window that no sequence can outgrow is none."""
    windows = tuple(window if window < config.max_model_len else 0 for window in config.windows)
    return KvShape(windows, config.num_kv_heads, config.head_dim, dtype, page_tokens)


def _limited(config: ModelConfig, max_model_len: int) -> ModelConfig:
    if not max_model_len:
        return config
    if max_model_len > config.max_model_len:
        raise ModelError(
            "max_model_len", f"{max_model_len} is beyond the {config.max_model_len} positions of the model"
        )
    return replace(config, max_model_len=max_model_len)
