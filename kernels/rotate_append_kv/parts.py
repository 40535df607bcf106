"""What rotate_append_kv's implementations are given, once it is checked."""

from typing import NamedTuple

import torch


class Rotary(NamedTuple):
    """A table of cosines and sines [max_positions, 2, rotary_dim / 2] and how many elements of a head it turns."""

    cos_sin: torch.Tensor
    dim: int


class HeadNorms(NamedTuple):
    """Weights of the norms of query heads and key heads."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float
