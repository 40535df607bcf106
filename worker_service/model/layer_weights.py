"""The weights of a layer as the decoder uses them, and how they are taken from a checkpoint's usual names.

Projections that read the same input are one matrix, so one GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from worker_service.model.spec import AttentionSpec, DenseSpec
from worker_service.model.tensors import TensorSource


class Linear(NamedTuple):
    """A projection: weight [N, K] and bias [N]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """`sinks` fp32 [num_heads]; the norms are of each head, [head_dim]."""

    qkv: Linear
    output: Linear
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DenseWeights:
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The norms behind a branch are there in a SANDWICH block only, the MLP's own one everywhere but in a PARALLEL."""

    mixer_norm: torch.Tensor
    mixer: AttentionWeights
    mlp: DenseWeights
    mlp_norm: torch.Tensor | None = None
    norm_behind_mixer: torch.Tensor | None = None
    norm_behind_mlp: torch.Tensor | None = None


def take_linear(source: TensorSource, names: list[str], rows: list[int], columns: int, *, bias: bool) -> Linear:
    """Returns the named projections as one, row under row."""
    weights = [source.take(f"{name}.weight", count, columns) for name, count in zip(names, rows, strict=True)]
    biases = [source.take(f"{name}.bias", count) for name, count in zip(names, rows, strict=True)] if bias else []
    return Linear(stacked(weights), stacked(biases) if biases else None)


def take_attention(source: TensorSource, prefix: str, spec: AttentionSpec, hidden: int) -> AttentionWeights:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = [f"{prefix}.{name}_proj" for name in "qkv"]
    qkv = take_linear(source, projections, [q_rows, kv_rows, kv_rows], hidden, bias=spec.qkv_bias)
    output = take_linear(source, [f"{prefix}.o_proj"], [hidden], q_rows, bias=spec.output_bias)
    if not spec.qk_norm:
        return AttentionWeights(qkv, output)
    norms = [source.take(f"{prefix}.{name}_norm.weight", spec.head_dim) for name in "qk"]
    return AttentionWeights(qkv, output, *norms)


def take_dense(source: TensorSource, prefix: str, spec: DenseSpec, hidden: int) -> DenseWeights:
    inner, names = spec.intermediate_size, [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
    gate_up = take_linear(source, names, [inner, inner], hidden, bias=spec.bias)
    return DenseWeights(gate_up, take_linear(source, [f"{prefix}.down_proj"], [hidden], inner, bias=spec.bias))


def stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
