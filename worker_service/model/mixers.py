"""The mixers of a decoder's layers, and what a launch gives them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from kernels.backend import Backend
from kernels.linear import packed_weight
from worker_service.model.layer_weights import AttentionWeights, Linear
from worker_service.model.norms import stored_norm
from worker_service.model.rope import RotaryTables
from worker_service.model.spec import AttentionSpec, NormSpec


class Heads(NamedTuple):
    """A layer's heads as its GEMM made them, [num_tokens, q_heads + 2 kv_heads, head_dim], and how to rotate them."""

    qkv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    sinks: torch.Tensor | None


class Attend(Protocol):
    """Rotates a layer's heads, appends K and V, and returns the attention output: [num_tokens, q_heads, head_dim]."""

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor: ...


class Gemm(Protocol):
    """x [num_rows, K] through a projection: [num_rows, N]."""

    def __call__(self, x: torch.Tensor, linear: Linear, /) -> torch.Tensor: ...


class Step(NamedTuple):
    """What one launch gives to every layer."""

    positions: torch.Tensor
    attend: Attend
    gemm: Gemm


def packed(linear: Linear, backend: Backend) -> Linear:
    return Linear(packed_weight(linear.weight, backend), linear.bias)


class AttentionMixer:
    """Attention over keys and values in pages."""

    def __init__(
        self,
        number: int,
        spec: AttentionSpec,
        weights: AttentionWeights,
        norm: NormSpec,
        rotary: RotaryTables,
        backend: Backend,
    ) -> None:
        self._number = number
        self._shape = (spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        self._qkv = packed(weights.qkv, backend)
        self._output = packed(weights.output, backend)
        self._q_norm, self._k_norm = (
            None if weight is None else stored_norm(norm, weight) for weight in (weights.q_norm, weights.k_norm)
        )
        self._sinks = weights.sinks
        self._eps = norm.eps
        self._cos_sin = rotary.of(spec.rope, spec.rotary_dim)

    def linears(self) -> list[Linear]:
        return [self._qkv, self._output]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        qkv = step.gemm(x, self._qkv)
        heads = Heads(
            qkv.view(qkv.shape[0], *self._shape),
            step.positions,
            self._cos_sin,
            self._q_norm,
            self._k_norm,
            self._eps,
            self._sinks,
        )
        attended = step.attend(self._number, heads)
        return step.gemm(attended.view(x.shape[0], -1), self._output)
