"""A layer's mixer, made as its spec says: one, or two side by side."""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.backend import Backend
from worker_service.model.attention_specs import CompressedSpec, LatentSpec
from worker_service.model.compressed_mixer import CompressedMixer
from worker_service.model.layer_weights import (
    AttentionWeights,
    CompressedWeights,
    GatedDeltaWeights,
    KimiDeltaWeights,
    LatentWeights,
    Linear,
    Mamba2Weights,
    MixerWeights,
    ParallelWeights,
    ShortConvWeights,
)
from worker_service.model.mixers import AttentionMixer, LatentMixer, Step
from worker_service.model.recurrent_mixers import GatedDeltaMixer, KimiDeltaMixer, Mamba2Mixer, ShortConvMixer
from worker_service.model.recurrent_specs import GatedDeltaSpec, KimiDeltaSpec, Mamba2Spec, ShortConvSpec
from worker_service.model.rope import RotaryTables
from worker_service.model.sparse_mixer import SparseLatentMixer
from worker_service.model.spec import MixerSpec, NormSpec, ParallelSpec


class Mixer(Protocol):
    """What lets a layer's tokens see others: rows [num_tokens, hidden_size] in and out."""

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor: ...

    def linears(self) -> list[Linear]: ...


class ParallelMixer:
    """Attention and a recurrence over the same input."""

    def __init__(self, spec: ParallelSpec, attention: Mixer, recurrence: Mixer) -> None:
        self._spec = spec
        self._attention = attention
        self._recurrence = recurrence

    def linears(self) -> list[Linear]:
        return [*self._attention.linears(), *self._recurrence.linears()]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        recurrence = self._recurrence(x, step) * self._spec.recurrence_scale
        return recurrence + self._attention(x, step) * self._spec.attention_scale


def make_mixer(
    number: int,
    spec: MixerSpec,
    weights: MixerWeights,
    norm: NormSpec,
    input_norm: torch.Tensor,
    rotary: RotaryTables,
    backend: Backend,
) -> Mixer:
    """Returns the mixer of the layer with that number; `input_norm` is the weight of the norm before it."""
    if isinstance(spec, ParallelSpec):
        assert isinstance(weights, ParallelWeights)
        rest = (norm, input_norm, rotary, backend)
        attention = make_mixer(number, spec.attention, weights.attention, *rest)
        return ParallelMixer(spec, attention, make_mixer(number, spec.recurrence, weights.recurrence, *rest))
    if isinstance(spec, LatentSpec):
        assert isinstance(weights, LatentWeights)
        if spec.index is not None:
            return SparseLatentMixer(number, spec, spec.index, weights, rotary, backend)
        return LatentMixer(number, spec, weights, rotary, backend)
    if isinstance(spec, CompressedSpec):
        assert isinstance(weights, CompressedWeights)
        return CompressedMixer(number, spec, weights, rotary, backend)
    if isinstance(spec, ShortConvSpec):
        assert isinstance(weights, ShortConvWeights)
        return ShortConvMixer(number, weights, backend)
    if isinstance(spec, Mamba2Spec):
        assert isinstance(weights, Mamba2Weights)
        return Mamba2Mixer(number, spec, weights, norm.eps, backend)
    if isinstance(spec, GatedDeltaSpec):
        assert isinstance(weights, GatedDeltaWeights)
        return GatedDeltaMixer(number, spec, weights, norm.eps, backend)
    if isinstance(spec, KimiDeltaSpec):
        assert isinstance(weights, KimiDeltaWeights)
        return KimiDeltaMixer(number, spec, weights, norm.eps, backend)
    assert isinstance(weights, AttentionWeights)
    return AttentionMixer(number, spec, weights, norm, input_norm, rotary, backend)
