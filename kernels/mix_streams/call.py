"""What collapse_streams and join_streams are called with, and what the former returns."""

from typing import NamedTuple

import torch

__all__ = ["Collapsed", "MixCall"]


class MixCall(NamedTuple):
    """Streams and what their weights are made of, named as the ops name them."""

    streams: torch.Tensor
    mixes: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    eps: float


class Collapsed(NamedTuple):
    """One row of each token's streams, x [num_tokens, hidden]; how a branch's output goes to each stream, post fp32
    [num_tokens, n], and how the streams go to each other, comb fp32 [num_tokens, n, n], from the first of both."""

    x: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
