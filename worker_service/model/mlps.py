"""The MLPs of a decoder's layers."""

from __future__ import annotations

from typing import NamedTuple, Protocol, assert_never

import torch

from kernels.backend import Backend, is_hopper
from kernels.combine_experts import combine_experts
from kernels.gated_activation import clamped_swiglu, gelu_mul, silu_mul
from kernels.grouped_linear import (
    GroupedWeight,
    first_experts,
    grouped_linear,
    last_expert,
    packed_experts,
    plan_experts,
)
from kernels.route_experts import Routing, route_experts
from worker_service.model.layer_weights import DenseWeights, Linear, MoeWeights
from worker_service.model.mixers import Step, packed
from worker_service.model.spec import Activation, DenseSpec, MoeSpec

# Of gpt-oss' activation, the same in all its files.
SWIGLU_LIMIT = 7.0
SWIGLU_ALPHA = 1.702
# Of DeepSeek V4's.
SILU_LIMIT = 10.0
# The most tokens of a launch whose shared expert is computed in the grouped product of the routed experts, which saves
# three launches a layer. A layer's experts on an H200, us, apart and fused: Kimi Linear 1 token 59 and 53, 16 361 and
# 359, 64 753 and 750, 256 918 and 931; Qwen3-Next in fp8 51 and 45, 154 and 148, 325 and 319, 446 and 475.
MOST_FUSED_TOKENS = 64


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


class Experts(NamedTuple):
    """The weights of a layer's experts, as `grouped_linear` takes them."""

    gate_up: GroupedWeight
    down: GroupedWeight
    num_experts: int


class MoeMlp:
    """A router, the experts that it chooses for each token, and the shared expert where there is one.

    A token's rows depend on no other token, and nothing waits for the device (ADR 16). Of few tokens the shared expert
    is computed as one more expert that all of them chose: on Hopper with the same bits.
    """

    def __init__(self, spec: MoeSpec, weights: MoeWeights, dtype: torch.dtype, backend: Backend) -> None:
        self._spec = spec
        self._router = packed(weights.router, backend)
        self._experts, self._with_shared = _packed_experts(spec, weights, dtype, backend)
        self._gate_up_bias, self._down_bias = weights.gate_up_bias, weights.down_bias
        self._selection_bias = weights.selection_bias
        self._experts_of_token = weights.experts_of_token
        self._shared: DenseMlp | None = None
        if spec.shared is not None:
            self._shared = DenseMlp(spec.shared, _shared_weights(weights, dtype), backend)
        self._latents = [packed(linear, backend) for linear in weights.latents or ()]
        self._backend = backend

    def linears(self) -> list[Linear]:
        return [self._router, *self._latents, *(self._shared.linears() if self._shared else [])]

    def fuses(self, num_tokens: int) -> bool:
        """Returns whether a launch of `num_tokens` has the shared expert in the routed experts' grouped product."""
        return self._with_shared is not None and num_tokens <= MOST_FUSED_TOKENS

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        spec, backend, gemm = self._spec, self._backend, step.gemm
        fuses = self.fuses(x.shape[0])
        experts = self._with_shared if fuses and self._with_shared else self._experts
        logits = gemm(x, self._router)
        routing = self._routing(logits[:, : spec.num_experts], step.token_ids, fuses)
        plan = plan_experts(routing.expert_ids, experts.num_experts, backend=backend)
        given = gemm(x, self._latents[0]) if self._latents else x
        inner = grouped_linear(given, experts.gate_up, plan, self._gate_up_bias, backend=backend)
        inner = activated(inner, spec.activation, backend)
        rows = grouped_linear(inner, experts.down, plan, self._down_bias, backend=backend)
        shared = None if self._shared is None or fuses else self._shared(x, step)
        if not self._latents:
            gate = logits[:, spec.num_experts, None] if spec.shared_gate else None
            return combine_experts(rows, routing.weights, shared, gate, fused_shared=fuses, backend=backend)
        out = gemm(combine_experts(rows, routing.weights, backend=backend), self._latents[1])
        return out if shared is None else out + shared

    def _routing(self, logits: torch.Tensor, token_ids: torch.Tensor, fuses: bool) -> Routing:
        table = self._experts_of_token
        ids = None if table is None else table[token_ids]
        rule, bias = self._spec.rule, self._selection_bias
        return route_experts(logits, rule, bias, expert_ids=ids, fused_shared=fuses, backend=self._backend)


def _packed_experts(
    spec: MoeSpec, weights: MoeWeights, dtype: torch.dtype, backend: Backend
) -> tuple[Experts, Experts | None]:
    """Returns the experts that the router chooses from, and these with the shared one behind them where it is fused."""
    count = spec.num_experts
    gate_up, down = (packed_experts(weight, backend, dtype=dtype) for weight in (weights.gate_up, weights.down))
    if not weights.fused_shared:
        return Experts(gate_up, down, count), None
    chosen = Experts(first_experts(gate_up, count), first_experts(down, count), count)
    fuses = fuses_shared(weights.router.weight.device, dtype, backend)
    return chosen, Experts(gate_up, down, count + 1) if fuses else None


def fuses_shared(device: torch.device, dtype: torch.dtype, backend: Backend) -> bool:
    """Returns whether a fused shared expert is computed with the others: of bf16 on Hopper their product was seen to
    give the bits of `linear`. Elsewhere it has products of its own."""
    return is_hopper(device) and dtype is torch.bfloat16 and backend is Backend.AUTO


def _shared_weights(weights: MoeWeights, dtype: torch.dtype) -> DenseWeights:
    """Returns the shared expert's weights for a product of its own."""
    if not weights.fused_shared:
        assert weights.shared is not None
        return weights.shared
    gate_up, down = (last_expert(weight, dtype) for weight in (weights.gate_up, weights.down))
    return DenseWeights(Linear(gate_up, None), Linear(down, None))


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
