"""The MLPs of a decoder's layers."""

from __future__ import annotations

from typing import Protocol, assert_never

import torch

from kernels.backend import Backend
from kernels.combine_experts import combine_experts
from kernels.gated_activation import clamped_swiglu, gelu_mul, silu_mul
from kernels.grouped_linear import grouped_linear, packed_experts, plan_experts
from kernels.route_experts import Routing, route_experts
from worker_service.model.layer_weights import DenseWeights, Linear, MoeWeights
from worker_service.model.mixers import Step, packed
from worker_service.model.spec import Activation, DenseSpec, MoeSpec

# Of gpt-oss' activation, the same in all its files.
SWIGLU_LIMIT = 7.0
SWIGLU_ALPHA = 1.702
# Of DeepSeek V4's.
SILU_LIMIT = 10.0


class Mlp(Protocol):
    """What a layer makes of each token alone: rows [num_tokens, hidden_size] in and out."""

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor: ...

    def linears(self) -> list[Linear]: ...


def make_mlp(
    spec: DenseSpec | MoeSpec, weights: DenseWeights | MoeWeights, dtype: torch.dtype, backend: Backend
) -> Mlp:
    """`dtype` is the model's, in which rows come."""
    if isinstance(spec, DenseSpec):
        assert isinstance(weights, DenseWeights)
        return DenseMlp(spec, weights, backend)
    assert isinstance(weights, MoeWeights)
    return MoeMlp(spec, weights, dtype, backend)


class DenseMlp:
    def __init__(self, spec: DenseSpec, weights: DenseWeights, backend: Backend) -> None:
        self._gate_up = packed(weights.gate_up, backend)
        self._down = packed(weights.down, backend)
        self._spec = spec
        self._backend = backend

    def linears(self) -> list[Linear]:
        return [self._gate_up, self._down]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        made = step.gemm(x, self._gate_up)
        if self._spec.gate_scale != 1.0:
            made[:, : self._spec.intermediate_size] *= self._spec.gate_scale
        return step.gemm(activated(made, self._spec.activation, self._backend), self._down)


class MoeMlp:
    """A router, the experts that it chooses for each token, and the shared expert where there is one.

    A token's rows depend on no other token, and nothing waits for the device (ADR 16).
    """

    def __init__(self, spec: MoeSpec, weights: MoeWeights, dtype: torch.dtype, backend: Backend) -> None:
        self._spec = spec
        self._router = packed(weights.router, backend)
        self._gate_up = packed_experts(weights.gate_up, backend, dtype=dtype)
        self._down = packed_experts(weights.down, backend, dtype=dtype)
        self._gate_up_bias, self._down_bias = weights.gate_up_bias, weights.down_bias
        self._selection_bias = weights.selection_bias
        self._experts_of_token = weights.experts_of_token
        self._shared: DenseMlp | None = None
        if spec.shared is not None:
            assert weights.shared is not None
            self._shared = DenseMlp(spec.shared, weights.shared, backend)
        self._latents = [packed(linear, backend) for linear in weights.latents or ()]
        self._backend = backend

    def linears(self) -> list[Linear]:
        return [self._router, *self._latents, *(self._shared.linears() if self._shared else [])]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        spec, backend, gemm = self._spec, self._backend, step.gemm
        logits = gemm(x, self._router)
        routing = self._routing(logits[:, : spec.num_experts], step.token_ids)
        plan = plan_experts(routing.expert_ids, spec.num_experts, backend=backend)
        given = gemm(x, self._latents[0]) if self._latents else x
        inner = grouped_linear(given, self._gate_up, plan, self._gate_up_bias, backend=backend)
        inner = activated(inner, spec.activation, backend)
        rows = grouped_linear(inner, self._down, plan, self._down_bias, backend=backend)
        shared = None if self._shared is None else self._shared(x, step)
        if not self._latents:
            gate = logits[:, spec.num_experts, None] if spec.shared_gate else None
            return combine_experts(rows, routing.weights, shared, gate, backend=backend)
        out = gemm(combine_experts(rows, routing.weights, backend=backend), self._latents[1])
        return out if shared is None else out + shared

    def _routing(self, logits: torch.Tensor, token_ids: torch.Tensor) -> Routing:
        table = self._experts_of_token
        ids = None if table is None else table[token_ids]
        return route_experts(logits, self._spec.rule, self._selection_bias, expert_ids=ids, backend=self._backend)


def activated(gate_up: torch.Tensor, activation: Activation, backend: Backend) -> torch.Tensor:
    """Returns the middle of an MLP, [num_rows, dim], from its two halves [num_rows, 2 dim]; RELU2 has one."""
    if activation is Activation.SILU:
        return silu_mul(gate_up, backend=backend)
    if activation is Activation.GELU_TANH:
        return gelu_mul(gate_up, backend=backend)
    if activation is Activation.CLAMPED_SWIGLU:
        return clamped_swiglu(gate_up, limit=SWIGLU_LIMIT, alpha=SWIGLU_ALPHA, backend=backend)
    if activation is Activation.CLAMPED_SILU:
        return silu_mul(gate_up, limit=SILU_LIMIT, backend=backend)
    if activation is Activation.RELU2:
        return gate_up.relu().square()
    assert_never(activation)
