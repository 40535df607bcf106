"""Parts that the decoders in training share: norm, MLP, rotation, first weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

INIT_STD = 0.02


class Norm(nn.Module):
    """The root mean square norm of a row; with `plus_one` the weight is what is added to 1."""

    def __init__(self, size: int, eps: float, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if plus_one else torch.ones(size))
        self._eps = eps
        self._plus_one = plus_one

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        weight = self.weight.float() + 1.0 if self._plus_one else self.weight.float()
        return (normed * weight).to(hidden.dtype)


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return inner


def rotary_table(max_positions: int, rotary_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines and sines, [max_positions, rotary_dim / 2] each, float32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), theta**-exponents)
    return angles.cos(), angles.sin()


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns heads whose first elements, as many as the table turns, are turned half against half."""
    turned = 2 * cos.shape[-1]
    first, second = heads[..., :turned].float().chunk(2, dim=-1)
    both = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
    return both if turned == heads.shape[-1] else torch.cat((both, heads[..., turned:]), dim=-1)


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)


def shrink_outputs(model: nn.Module, num_layers: int) -> None:
    """What writes to the residual stream starts small, so that depth does not make it grow."""
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            nn.init.normal_(weight, std=INIT_STD / (2 * num_layers) ** 0.5)
