"""Muon: momentum whose matrices are made orthogonal before they are taken as a step; matrices of one shape at once.

What is not a matrix, and embeddings, belong to another optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

# A quintic that drives singular values towards 1; five rounds bring all of them between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
# A step's entries are as large as AdamW's usually are, so that both share one learning rate.
STEP_SIZE = 0.2


class Muon(torch.optim.Optimizer):
    """`params` are matrices. State is one momentum buffer for each."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._step_alike(parameters, group["lr"], group["momentum"], group["weight_decay"])

    def _step_alike(self, parameters: list[torch.Tensor], rate: float, momentum: float, weight_decay: float) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        ahead = torch.stack(torch._foreach_lerp(gradients, buffers, momentum))
        steps = orthogonalised(ahead) * (STEP_SIZE * max(ahead.shape[-2:]) ** 0.5)
        torch._foreach_mul_(parameters, 1 - rate * weight_decay)
        torch._foreach_add_(parameters, list(steps.unbind()), alpha=-rate)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """[count, rows, columns]: each matrix with its singular values brought near 1, by Newton and Schulz's iteration."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    steps: torch.Tensor = (x.mT if tall else x).to(matrices.dtype)
    return steps
