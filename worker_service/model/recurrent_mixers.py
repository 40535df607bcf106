"""The mixers of layers with a recurrent state."""

from __future__ import annotations

import torch

from kernels.backend import Backend
from kernels.block_scan import Mamba2Steps
from kernels.gated_activation import silu_mul
from kernels.gates import delta_gates, gated_rms_norm
from kernels.rms_norm import rms_norm
from worker_service.model.layer_weights import (
    GatedDeltaWeights,
    KimiDeltaWeights,
    Linear,
    Mamba2Weights,
    ShortConvWeights,
)
from worker_service.model.mixers import GatedDeltaRows, Mamba2Rows, Step, Taps, packed
from worker_service.model.recurrent_specs import GatedDeltaSpec, KimiDeltaSpec, Mamba2Spec


class ShortConvMixer:
    """LFM2's short convolution: one gate before a causal convolution over the last tokens, and one behind it."""

    def __init__(self, number: int, weights: ShortConvWeights, backend: Backend) -> None:
        self._number = number
        self._inner = packed(weights.inner, backend)
        self._taps = Taps(weights.taps, weights.bias)
        self._output = packed(weights.output, backend)

    def linears(self) -> list[Linear]:
        return [self._inner, self._output]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        gate_before, gate_behind, values = step.gemm(x, self._inner).chunk(3, dim=-1)
        mixed = step.states.convolve(self._number, gate_before * values, self._taps)
        return step.gemm(gate_behind * mixed, self._output)


class Mamba2Mixer:
    """Mamba2: a convolution, the recurrence, and a norm of what it gives, gated before or behind."""

    def __init__(self, number: int, spec: Mamba2Spec, weights: Mamba2Weights, eps: float, backend: Backend) -> None:
        self._number = number
        self._spec = spec
        self._inner = packed(weights.inner, backend)
        self._taps = Taps(weights.taps, weights.conv_bias, has_silu=True)
        self._scales = _scales(spec, weights.inner.weight)
        self._decay = -torch.exp(weights.a_log)
        self._skip, self._step_bias = weights.skip, weights.step_bias
        self._norm = GroupedNorm(weights.norm, spec.norm_groups, eps, backend) if weights.norm is not None else None
        self._output = packed(weights.output, backend)
        self._backend = backend

    def linears(self) -> list[Linear]:
        return [self._inner, self._output]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        spec = self._spec
        made = step.gemm(x, self._inner)
        if self._scales is not None:
            made = made * self._scales
        gate, channels, raw = made.split_with_sizes([spec.inner_size, spec.channels, spec.num_heads], dim=1)
        mixed = step.states.convolve(self._number, channels, self._taps)
        group_size = spec.num_groups * spec.d_state
        values, b, c = mixed.split_with_sizes([spec.inner_size, group_size, group_size], dim=1)
        heads, groups = (-1, spec.num_heads, spec.head_dim), (-1, spec.num_groups, spec.d_state)
        rows = Mamba2Rows(
            values.view(heads),
            b.view(groups),
            c.view(groups),
            Mamba2Steps(raw, self._step_bias, self._decay, spec.least_step, spec.most_step),
            self._skip,
            None if spec.norm_first else gate.view(heads),
        )
        out = step.states.mamba2(self._number, rows).view(x.shape[0], -1)
        if self._norm is not None:
            out = self._norm(out)
        if spec.norm_first:
            out = silu_mul(torch.cat([gate, out], dim=1), backend=self._backend)
        return step.gemm(out, self._output)


def _scales(spec: Mamba2Spec, like: torch.Tensor) -> torch.Tensor | None:
    """Returns a factor for each element that the first projection makes; None where all of them are 1."""
    if all(scale == 1.0 for scale in spec.scales):
        return None
    return torch.cat([like.new_full((size,), scale) for size, scale in zip(spec.sizes, spec.scales, strict=True)])


class GatedDeltaMixer:
    """The gated delta rule behind a convolution; each head's output is normed, then gated."""

    def __init__(
        self, number: int, spec: GatedDeltaSpec, weights: GatedDeltaWeights, eps: float, backend: Backend
    ) -> None:
        self._number = number
        self._spec = spec
        self._inner = packed(weights.inner, backend)
        self._taps = Taps(weights.taps, None, has_silu=True)
        self._decay, self._decay_bias = -torch.exp(weights.a_log), weights.decay_bias
        self._norm = weights.norm
        self._eps = eps
        self._output = packed(weights.output, backend)
        self._backend = backend

    def linears(self) -> list[Linear]:
        return [self._inner, self._output]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        spec, made = self._spec, step.gemm(x, self._inner)
        heads, keys = spec.num_heads, spec.num_k_heads * spec.key_dim
        channels, gate, beta, decay = made.split_with_sizes(
            [spec.channels, heads * spec.value_dim, heads, heads], dim=-1
        )
        mixed = step.states.convolve(self._number, channels, self._taps)
        q, k, v = mixed.split_with_sizes([keys, keys, heads * spec.value_dim], dim=-1)
        rows = GatedDeltaRows(
            q.view(-1, spec.num_k_heads, spec.key_dim),
            k.view(-1, spec.num_k_heads, spec.key_dim),
            v.view(-1, heads, spec.value_dim),
            *delta_gates(decay, beta, self._decay_bias, self._decay, backend=self._backend),
        )
        out = step.states.gated_delta(self._number, rows)
        return step.gemm(gated_rms_norm(out, self._norm, self._eps, gate, backend=self._backend), self._output)


class KimiDeltaMixer:
    """Kimi Delta Attention behind a convolution; each head's output is normed, then gated by a sigmoid."""

    def __init__(
        self, number: int, spec: KimiDeltaSpec, weights: KimiDeltaWeights, eps: float, backend: Backend
    ) -> None:
        self._number = number
        self._spec = spec
        self._inner = packed(weights.inner, backend)
        self._taps = Taps(weights.taps, None, has_silu=True)
        self._decay_up, self._gate_up = (packed(linear, backend) for linear in (weights.decay_up, weights.gate_up))
        self._decay, self._decay_bias = -torch.exp(weights.a_log), weights.decay_bias
        self._norm = weights.norm
        self._eps = eps
        self._output = packed(weights.output, backend)
        self._backend = backend

    def linears(self) -> list[Linear]:
        return [self._inner, self._decay_up, self._gate_up, self._output]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        spec, made = self._spec, step.gemm(x, self._inner)
        channels, decay, gate, beta = made.split_with_sizes([spec.channels, spec.rank, spec.rank, spec.num_heads], 1)
        g, betas = delta_gates(
            step.gemm(decay, self._decay_up), beta, self._decay_bias, self._decay, backend=self._backend
        )
        mixed = step.states.convolve(self._number, channels, self._taps)
        heads = (-1, spec.num_heads, spec.head_dim)
        q, k, v = (part.view(heads) for part in mixed.chunk(3, dim=1))
        out = step.states.gated_delta(self._number, GatedDeltaRows(q, k, v, g.view(heads), betas))
        logits = step.gemm(gate, self._gate_up)
        normed = gated_rms_norm(out, self._norm, self._eps, logits, silu=False, backend=self._backend)
        return step.gemm(normed, self._output)


class GroupedNorm:
    """The root mean square norm of equal parts of a row, each on its own."""

    def __init__(self, weight: torch.Tensor, num_groups: int, eps: float, backend: Backend) -> None:
        self._weight = weight
        self._num_groups = num_groups
        # Of parts: the kernel has one weight for all rows.
        self._ones = torch.ones_like(weight[: weight.shape[0] // num_groups])
        self._eps = eps
        self._backend = backend

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._num_groups == 1:
            return rms_norm(x, self._weight, self._eps, backend=self._backend)
        parts = x.reshape(x.shape[0] * self._num_groups, -1)
        return rms_norm(parts, self._ones, self._eps, backend=self._backend).view_as(x) * self._weight
