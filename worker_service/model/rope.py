"""Rotary position embeddings: tables of cosines and sines for every position that a model can see."""

from __future__ import annotations

import math

import torch

from worker_service.model.attention_specs import RopeConfig, RopeKind


class RotaryTables:
    """Tables of cosines and sines by position, fp32 [max_tokens, 2, rotary_dim / 2], cosines before sines; layers with
    the same rope share one."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._max_tokens = max_tokens
        self._device = device
        self._tables: dict[tuple[RopeConfig | None, int], torch.Tensor] = {}

    def of(self, rope: RopeConfig | None, rotary_dim: int) -> torch.Tensor:
        """Without a rope no head turns: the first two elements by cosine 1 and sine 0."""
        table = self._tables.get((rope, rotary_dim))
        if table is None:
            made = _unturned(self._max_tokens) if rope is None else cos_sin_table(rope, rotary_dim, self._max_tokens)
            table = self._tables[rope, rotary_dim] = made.to(self._device)
        return table


def _unturned(max_tokens: int) -> torch.Tensor:
    return torch.tensor([[1.0], [0.0]]).repeat(max_tokens, 1, 1)


def cos_sin_table(rope: RopeConfig, rotary_dim: int, max_tokens: int) -> torch.Tensor:
    """Returns cosine and sine by position; the scaling variants differ only in the frequencies and one factor.

    A pure function of the position, never of the sequence's present length: cached keys stay true while it grows. So
    the dynamic variant keeps its trained frequencies, which is what it does up to the trained length.
    """
    angles = torch.outer(torch.arange(max_tokens, dtype=torch.float32), _frequencies(rope, rotary_dim))
    return torch.stack((angles.cos(), angles.sin()), dim=1) * _attention_factor(rope)


def _frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind is RopeKind.LINEAR:
        return frequencies / config.factor
    if config.kind is RopeKind.LLAMA3:
        return _llama3(config, frequencies)
    if config.kind is RopeKind.YARN:
        return _yarn(config, frequencies, head_dim)
    return frequencies


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, and those between blended."""
    turns = config.original_max_tokens * frequencies / (2 * math.pi)
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = blend.clamp(0.0, 1.0)
    return frequencies * kept + frequencies / config.factor * (1.0 - kept)


def _yarn(config: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often within the trained length are kept, slow ones stretched, with a ramp between."""

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(config.original_max_tokens / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies / config.factor * stretched + frequencies * (1.0 - stretched)


def _attention_factor(config: RopeConfig) -> float:
    if config.kind is not RopeKind.YARN:
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _yarn_scale(config.factor, config.mscale) / _yarn_scale(config.factor, config.mscale_all_dim)
    return _yarn_scale(config.factor, 1.0)


def yarn_mscale(rope: RopeConfig) -> float:
    """Returns the factor of queries, and again of keys, under a YaRN rope with `mscale_all_dim`; 1 for other ropes."""
    return _yarn_scale(rope.factor, rope.mscale_all_dim) if rope.kind is RopeKind.YARN else 1.0


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
