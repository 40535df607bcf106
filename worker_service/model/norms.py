"""The norms of a model's rows, with the residual's sum before them in one call."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from kernels.backend import Backend
from kernels.rms_norm import rms_norm
from worker_service.model.spec import NormKind, NormSpec


class Norm(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def with_residual(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of x + residual, and that sum, rounded to x's dtype."""
        ...


def make_norm(spec: NormSpec, weight: torch.Tensor, backend: Backend) -> Norm:
    if spec.kind is NormKind.LAYER:
        return LayerNorm(weight, spec.eps)
    return RmsNorm(stored_norm(spec, weight), spec.eps, backend)


def stored_norm(spec: NormSpec, weight: torch.Tensor) -> torch.Tensor:
    """Returns what the rows are multiplied by. Counted from one, a weight is kept in fp32: 1 + w has more digits."""
    return weight.float() + 1.0 if spec.kind is NormKind.RMS_PLUS_ONE else weight


class RmsNorm:
    def __init__(self, weight: torch.Tensor, eps: float, backend: Backend) -> None:
        self._weight = weight
        self._eps = eps
        self._backend = backend

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._weight, self._eps, backend=self._backend)

    def with_residual(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(x, self._weight, self._eps, residual=residual, backend=self._backend)


class LayerNorm:
    """By mean and variance, in fp32 and rounded once; a row's bits depend on the row alone."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x.float(), x.shape[-1:], self._weight, eps=self._eps).to(x.dtype)

    def with_residual(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self(total), total
