"""A model folder (or hub id) made ready to serve: config, weights, tokenizer, digest, and the shape of its pages."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.backend import Backend
from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import RopeKind
from worker_service.model.config import read_model_spec
from worker_service.model.decoder import Decoder
from worker_service.model.device import STORED, pick_dtype, pick_expert_formats
from worker_service.model.digest import digesting
from worker_service.model.hub import resolve_folder
from worker_service.model.spec import ModelSpec, with_max_model_len
from worker_service.model.tokenizer import TOKENIZER, Tokenizer, eos_token_ids
from worker_service.model.weights import open_weights

LOG_SECONDS = 2.0

_log = logging.getLogger("worker_service")


class LoadedModel(NamedTuple):
    """`digest` identifies the model (32 bytes) by its content, not by its folder's name."""

    spec: ModelSpec
    model: Decoder
    tokenizer: Tokenizer
    digest: bytes


def load_model(
    model: str,
    device: torch.device,
    *,
    dtype: str = "auto",
    max_model_len: int = 0,
    backend: Backend = Backend.AUTO,
    expert_weights: str = STORED,
) -> LoadedModel:
    """Cheap checks first, so that a bad folder is reported before gigabytes are read.

    max_model_len 0 means the config's.
    """
    folder = resolve_folder(model)
    spec = _limited(read_model_spec(folder), max_model_len)
    tokenizer = _tokenizer(folder, spec)
    if not spec.eos_token_ids:
        spec = replace(spec, eos_token_ids=eos_token_ids(folder, tokenizer))
    with digesting(folder) as digest:
        progress, kept_formats = _LoggedProgress(), pick_expert_formats(expert_weights, device)
        model_dtype = pick_dtype(dtype, spec.dtype, device)
        tensors = open_weights(folder, spec, model_dtype, device, progress, kept_formats=kept_formats)
        loaded = LoadedModel(spec, Decoder(spec, tensors, device, backend), tokenizer, digest())
    kept_mb = {name: num_bytes >> 20 for name, num_bytes in tensors.kept_bytes.items()}
    _log.info("weights loaded", extra={"weights_mb": tensors.made_bytes >> 20, "experts_as_stored_mb": kept_mb})
    return loaded


def _tokenizer(folder: Path, spec: ModelSpec) -> Tokenizer:
    if not (folder / TOKENIZER).is_file():
        raise ModelError(TOKENIZER, "is not in the model folder")
    tokenizer = Tokenizer(folder / TOKENIZER)
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(
            TOKENIZER, f"has {tokenizer.vocab_size} tokens, but the model's vocab_size is {spec.vocab_size}"
        )
    return tokenizer


class _LoggedProgress:
    """A line every LOG_SECONDS while weights are loaded; a small model needs none."""

    def __init__(self) -> None:
        self._logged_at = time.monotonic()

    def __call__(self, loaded_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            _log.info("loading weights", extra={"loaded_mb": loaded_bytes >> 20, "total_mb": total_bytes >> 20})


def _how_to_extend(spec: ModelSpec) -> str:
    """Returns what config.json would have to say for a longer context."""
    if any(rope.kind is RopeKind.DYNAMIC for rope in spec.ropes):
        return "; rope_type dynamic is served up to max_position_embeddings only, since beyond it cached keys change"
    return (
        "; where the model allows for more, say so in config.json: max_position_embeddings, or rope_parameters with "
        "rope_type yarn, factor and original_max_position_embeddings"
    )


def _limited(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    if not max_model_len:
        return spec
    if max_model_len > spec.max_model_len:
        raise ModelError(
            "max_model_len",
            f"{max_model_len} is beyond the {spec.max_model_len} positions of the model{_how_to_extend(spec)}",
        )
    return with_max_model_len(spec, max_model_len)
