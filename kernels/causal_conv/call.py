"""The checked arguments of one causal_conv call."""

from typing import NamedTuple

import torch

from kernels.state_slots import StateSlots

__all__ = ["CausalConvCall"]


class CausalConvCall(NamedTuple):
    """A layer's rows of tokens, its weights, and the columns that its sequences carry."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    states: torch.Tensor
    slots: StateSlots
    has_silu: bool

    @property
    def channels(self) -> int:
        return self.weight.shape[0]

    @property
    def d_conv(self) -> int:
        """Tokens that an output is made of."""
        return self.weight.shape[1]
