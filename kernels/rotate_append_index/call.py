"""The checked arguments of one rotate_append_index call."""

from typing import NamedTuple

import torch

__all__ = ["IndexQueries", "RotateAppendIndexCall"]


class IndexQueries(NamedTuple):
    """What `index_logits` takes: queries [num_tokens, heads, dim] and fp32 weights [num_tokens, heads]."""

    q: torch.Tensor
    weights: torch.Tensor


class RotateAppendIndexCall(NamedTuple):
    """An indexer's queries, their heads' weights and keys, where they stand and where the keys go."""

    q: torch.Tensor
    weights: torch.Tensor
    k: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    pages: torch.Tensor
    slot_mapping: torch.Tensor
    norm: torch.Tensor
    bias: torch.Tensor
    eps: float
    scales: torch.Tensor | None

    @property
    def rope(self) -> int:
        """Elements that turn, of a head of q and of a key."""
        return 2 * self.cos_sin.shape[2]
