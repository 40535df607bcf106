"""The MLPs of a decoder's layers."""

from __future__ import annotations

import torch

from kernels.backend import Backend
from kernels.silu_mul import silu_mul
from worker_service.model.layer_weights import DenseWeights, Linear
from worker_service.model.mixers import Gemm, packed
from worker_service.model.spec import DenseSpec


class DenseMlp:
    def __init__(self, spec: DenseSpec, weights: DenseWeights, backend: Backend) -> None:
        self._gate_up = packed(weights.gate_up, backend)
        self._down = packed(weights.down, backend)
        self._activation = spec.activation
        self._backend = backend

    def linears(self) -> list[Linear]:
        return [self._gate_up, self._down]

    def __call__(self, x: torch.Tensor, gemm: Gemm) -> torch.Tensor:
        return gemm(silu_mul(gemm(x, self._gate_up), backend=self._backend), self._down)
